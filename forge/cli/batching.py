"""`forge batching`: the batching chapter's experiment. The same requests 1, 4, 16 at once: what is won, who waits?"""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, load_model, run_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge.bench.engine import How
    from forge.views.report import Report

_WORKLOAD = "Requests"
BATCHES = (1, 4, 16)
TURNS = 3
"""Of each way; the one in the middle is shown."""


def batching(
    ctx: typer.Context,
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="How many requests.", rich_help_panel=_WORKLOAD)
    ] = 32,
    prompt_tokens: options.PromptTokensOption = "16",
    max_tokens: options.OutputTokensOption = "8:64",
    seed: options.WorkloadSeedOption = 0,
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
    json: options.JsonOption = False,
) -> Found:
    """6. One decision per iteration: requests together, static and continuous.

    [dim]forge batching --only run --requests 32[/dim]
    """
    if bug is not None:
        return run_bug("batching", bug, device, threads, json)
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    loading = options.model_options(device=device, threads=threads)
    report = measure_ways(model, loading, (requests, prompt_tokens, max_tokens, seed), ways_of(BATCHES), TURNS)
    return report.as_json() if json else report


def ways_of(batches: "Sequence[int]") -> "list[tuple[How, int]]":
    """One at a time, then each size static and continuous."""
    larger = [batch for batch in batches if batch > 1]
    ways: list[tuple[How, int]] = [("continuous", 1)]
    for batch in larger:
        ways += [("static", batch), ("continuous", batch)]
    return ways


def measure_ways(
    model: str,
    loading: dict,
    asked: tuple[int, str, str, int],
    ways: "Sequence[tuple[How, int]]",
    turns: int,
) -> "Report":
    """Load the model, run the workload that `asked` describes (requests, prompt tokens, output tokens, seed) in every
    way, and report."""
    from forge.bench.engine import identical, measure_all
    from forge.bench.workload import Range, make_workload
    from forge.views.batching import batching_object, print_batching
    from forge.views.bench import BenchProgress
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    number, prompt_tokens, max_tokens, seed = asked
    prompt_range = Range.parse(prompt_tokens, "--prompt-tokens")
    output_range = Range.parse(max_tokens, "--max-tokens")
    llm = load_model(model, **({"kv": "paged"} | loading))
    workload = make_workload(llm.tokenizer, number, prompt_range, output_range, seed=seed)
    with BenchProgress(open_error_console()) as progress:
        measured = measure_all(llm, workload, ways, turns, progress)
    label = run_label(llm)
    return Report(
        batching_object(label, workload, measured),
        lambda console: print_batching(console, label, workload, measured),
        0 if identical(measured) else 1,
    )
