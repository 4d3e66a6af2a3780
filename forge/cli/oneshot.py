"""`forge oneshot`: the experiment of its chapter. The same judge requests through both lives, and what each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, load_model, run_label

if TYPE_CHECKING:
    from forge.views.report import Report

LIVES = {"decode": False, "oneshot": True}
"""`--class`: whether a generation of one token is prefill-only."""
WARM_UP = 2
"""Requests that are not timed."""


def oneshot(
    ctx: typer.Context,
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="How many requests.", rich_help_panel="Requests")
    ] = 64,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", help="Of each answer; above 1 both are generations.", rich_help_panel="Requests"),
    ] = 1,
    model: options.ModelOption = "tales",
    kv: options.KvOption = "paged",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = None,
    oneshot_tokens: options.OneshotTokensOption = None,
    oneshot_memory: options.OneshotMemoryOption = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    """8. Not every request has a long life: judge, classify, score, embed.

    [dim]forge oneshot --only run --requests 64[/dim]
    """
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        oneshot_tokens=oneshot_tokens,
        oneshot_memory=oneshot_memory,
    )
    report = _measure(model, loading, requests, max_tokens)
    return report.as_json() if json else report


def _measure(model: str, loading: dict, requests: int, max_tokens: int) -> "Report":
    """The same requests through each life once, on one model, after a few that are not timed."""
    from forge.bench.judging import judge_prompts, run_requests
    from forge.views.bench import BenchProgress
    from forge.views.oneshot import Life, TwoLives, lives_object, print_lives
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    llm = load_model(model, **loading)
    prompts = judge_prompts(llm.tokenizer, requests)
    lives = []
    with BenchProgress(open_error_console()) as progress:
        for name, keeps_nothing in LIVES.items():
            progress(name)
            records: list = []
            run_requests(llm.new_engine(oneshot=keeps_nothing), prompts[:WARM_UP], max_tokens)
            engine = llm.new_engine(oneshot=keeps_nothing)
            lives.append(Life(name, run_requests(engine, prompts, max_tokens, on_step=records.append), tuple(records)))
    scratch, layout = len(llm.engine.scheduler.prefill_only.scratch), llm.kv_layout
    result = TwoLives(
        run_label(llm),
        sum(map(len, prompts)),
        tuple(lives),
        llm.engine.cache.stats().num_blocks,
        scratch,
        scratch * layout.block_size * layout.bytes_per_token,
    )
    return Report(lives_object(result), lambda console: print_lives(console, result), 0 if result.identical else 1)
