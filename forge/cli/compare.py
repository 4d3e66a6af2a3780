"""`forge compare`: the same prompts on two sides that differ in one option. Same tokens? At what cost?"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options
from forge.cli.arrivals import Arrival, drive_arrivals
from forge.cli.compare_judging import compare_judging, is_judging
from forge.cli.running import Found, exit_status, load_model, warm_up
from forge.cli.versus import Versus, versus_of

if TYPE_CHECKING:
    from forge.trace.records import StepRecord
    from forge.views.comparison import Side

DIFFERENT = 1
"""The exit status when the two sides' tokens differ."""

_LOADING = (
    "kv", "device", "threads", "max_model_len", "block_size", "num_blocks", "kv_memory", "kv_dtype", "quantize",
)  # fmt: skip
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")


def compare(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    kv: options.KvOption = "off",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    num_blocks: options.NumBlocksOption = None,
    kv_memory: options.KvMemoryOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantize: options.QuantizeOption = None,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    top_k: options.TopKOption = 0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionPenaltyOption = 1.0,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    ignore_eos: options.IgnoreEosOption = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="A file of prompts instead, one to a line. Each comes one step after the one before.",
            rich_help_panel="Prompt",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", help="So many judge requests instead, all at once.", rich_help_panel="Prompt"),
    ] = None,
    execution_class: Annotated[
        str,
        typer.Option(
            "--class", help="Life of a request of one token: oneshot, or decode.", rich_help_panel="Scheduler"
        ),
    ] = "oneshot",
    planning: Annotated[
        str,
        typer.Option(
            "--planning",
            help="Wait for what another request computes: on, or off. With it a file's prompts come all at once.",
            rich_help_panel="Scheduler",
        ),
    ] = "on",
    max_num_seqs: options.MaxNumSeqsOption = None,
    json: options.JsonOption = False,
) -> Found:
    """Run one prompt, or those of a file, on two sides that differ in one option, given as A vs B.

    Every other option holds for both sides. Exit status 1 if the tokens differ.

    [dim]forge compare --kv off vs on "The fox and the lantern" 64[/dim]

    [dim]forge compare --kv paged vs prefix --prompts questions.txt[/dim]

    [dim]forge compare --class decode vs oneshot --requests 64[/dim]
    """
    from forge.views.comparison import (
        ComparisonProgress,
        Side,
        compare_runs,
        comparison_object,
        print_comparison,
        print_interrupted,
        question_for,
    )
    from forge.views.report import Report
    from forge.views.terminal import open_console

    versus = versus_of(ctx)
    texts = options.read_prompts(prompts) if prompts is not None else None
    if texts is not None or requests is not None:
        max_tokens = _number_alone(ctx, prompt, max_tokens)
    if is_judging(ctx.params, versus):
        if texts is None and requests is None and ctx.get_parameter_source("prompt").name == "COMMANDLINE":
            texts = [options.read_prompt(prompt)]
        report = compare_judging(*_for_judging(ctx, versus), texts, _length_of_answers(ctx, max_tokens))
        return report.as_json() if json else report
    texts = texts or [options.read_prompt(prompt)]
    question = question_for(versus.option)
    console = open_console()
    sides: list[Side] = []
    with ComparisonProgress(console, question, versus.names, max_tokens, quiet=json) as progress:
        for name, given in zip(versus.names, (ctx.params, versus.right), strict=True):
            side = _run_side(name, {**given, "max_tokens": max_tokens}, texts, sides, progress.step)
            sides.append(side)
            if side.result.interrupted:
                break
    if sides[-1].result.interrupted:
        print_interrupted(console, sides)
        raise typer.Exit(exit_status(sides[-1].result))
    comparison = compare_runs(question, versus.option, *sides)
    shown = texts[0] if len(texts) == 1 else f"{len(texts)} prompts of {prompts}, each one step after the one before"
    report = Report(
        comparison_object(comparison),
        lambda console: print_comparison(console, comparison, shown),
        0 if comparison.identical else DIFFERENT,
    )
    return report.as_json() if json else report


def _for_judging(ctx: typer.Context, versus: "Versus") -> "tuple[dict[str, Any], Versus]":
    """Both sides' parameters, with a cache that shares prefixes where nobody asked for another."""
    given = ctx.get_parameter_source("kv").name != "DEFAULT" or versus.option == "--kv"
    kv = {} if given else {"kv": "prefix"}
    return ctx.params | kv, replace(versus, right=dict(versus.right) | kv)


def _length_of_answers(ctx: typer.Context, max_tokens: int) -> int:
    """One token where nobody said otherwise."""
    said = any(ctx.get_parameter_source(name).name == "COMMANDLINE" for name in ("prompt", "max_tokens"))
    return max_tokens if said else 1


def _number_alone(ctx: typer.Context, prompt: str, max_tokens: int) -> int:
    """MAX_TOKENS where the prompts are not on the command line: what stands in their place can only be that.

    Raises `UsageError` for a prompt beside them.
    """
    from forge.errors import UsageError

    given = [name for name in ("prompt", "max_tokens") if ctx.get_parameter_source(name).name == "COMMANDLINE"]
    if not given:
        return max_tokens
    if given == ["prompt"] and prompt.isdecimal():
        return int(prompt)
    raise UsageError(f"--prompts or --requests says what is asked: leave out {prompt!r}, and give MAX_TOKENS alone")


def _run_side(
    name: str,
    given: Mapping[str, Any],
    prompts: Sequence[str],
    earlier: "Sequence[Side]",
    on_step: "Callable[[int, StepRecord], None]",
) -> "Side":
    """Load what this side asks for and run it. A seed that nobody gave is drawn once, for both sides."""
    from forge.views.comparison import Answer, Side
    from forge.views.summary import RunResult

    params = options.sampling_params(**{option: given[option] for option in _SAMPLING})
    if params.seed is None:
        seed = earlier[0].result.output.seed if earlier else secrets.randbits(32)
        params = replace(params, seed=seed)
    llm = load_model(given["model"], **options.model_options(**{option: given[option] for option in _LOADING}))
    warm_up(llm, prompts[0])
    arrivals = [Arrival(prompt, params, step) for step, prompt in enumerate(prompts)]
    found = drive_arrivals(llm, arrivals, lambda record: on_step(len(earlier), record), keep_logits=True)
    first, *others = (
        Answer(output, logits) for output, logits in zip_longest(found.outputs, found.logits, fillvalue=())
    )
    result = RunResult(found.label, found.records, first.output, not params.greedy, found.interrupted)
    return Side(name, result, first.logits, tuple(others))
