"""`forge bench oneshot` and `forge bench prefix-planning`: what it is worth to hold only what a request needs."""

from typing import Annotated

import typer

from forge.cli import machine, options
from forge.cli.running import Found, load_model

_MEASURE = "Measurement"
RequestsOption = Annotated[
    int | None,
    typer.Option(
        "--requests", "-n", help="In a turn.", show_default="twice the callers, at least 16", rich_help_panel=_MEASURE
    ),
]
RepsOption = Annotated[int, typer.Option("--reps", help="Turns; the median counts.", rich_help_panel=_MEASURE)]


def bench_oneshot(
    model: options.ModelOption = "tales",
    kv: options.KvOption = "paged",
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="Parts, with commas: sweep, control, capacity, packing.",
            show_default="all",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Callers, with commas.", rich_help_panel=_MEASURE)
    ] = "1,4,16,64,128",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of each.", rich_help_panel=_MEASURE)] = 128,
    requests: RequestsOption = None,
    reps: RepsOption = 5,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = None,
    oneshot_tokens: options.OneshotTokensOption = None,
    oneshot_memory: options.OneshotMemoryOption = None,
    json: options.JsonOption = False,
) -> Found:
    """Requests of one token as generations and prefill-only: requests/s, latency, capacity, packing.

    [dim]forge bench oneshot -m hash[/dim]
    """
    from forge.bench.oneshot import PARTS, oneshot_benchmark_object, run
    from forge.errors import UsageError
    from forge.views.bench import BenchProgress
    from forge.views.oneshot_bench import print_oneshot_benchmark
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    callers = [int(number) if number.strip().isdecimal() else 0 for number in concurrency.split(",")]
    if min(callers) < 1:
        raise UsageError(f"--concurrency takes numbers of callers such as 1,16,128, and not {concurrency!r}")
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        oneshot_tokens=oneshot_tokens,
        oneshot_memory=oneshot_memory,
    )
    llm = load_model(model, **loading)
    parts = [part.strip() for part in only.split(",")] if only else PARTS
    with BenchProgress(open_error_console()) as progress:
        result = run(llm, parts, callers, prompt_tokens, requests, reps, progress, machine.cpu_model())
    report = Report(
        oneshot_benchmark_object(result),
        lambda console: print_oneshot_benchmark(console, result),
        0 if result.identical else 1,
    )
    return report.as_json() if json else report


def bench_planning(
    model: options.ModelOption = "tales",
    requests: Annotated[int, typer.Option("--requests", "-n", help="All at once.", rich_help_panel=_MEASURE)] = 64,
    rubric_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--rubric-tokens",
            help="Tokens that all begin with; may be repeated.",
            show_default="100, 400, 1000",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    item_tokens: Annotated[
        int, typer.Option("--item-tokens", help="Tokens of each one's own.", rich_help_panel=_MEASURE)
    ] = 32,
    reps: RepsOption = 3,
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    json: options.JsonOption = False,
) -> Found:
    """Requests that begin with one rubric, with and without waiting for the one that computes it.

    [dim]forge bench prefix-planning --rubric-tokens 400[/dim]
    """
    from forge.bench.planning import RUBRIC_TOKENS, planning_benchmark_object, run
    from forge.views.bench import BenchProgress
    from forge.views.oneshot_bench import print_planning_benchmark
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    loading = options.model_options(kv="prefix", device=device, threads=threads, num_blocks=num_blocks)
    llm = load_model(model, **loading)
    with BenchProgress(open_error_console()) as progress:
        result = run(llm, rubric_tokens or RUBRIC_TOKENS, requests, item_tokens, reps, progress, machine.cpu_model())
    report = Report(
        planning_benchmark_object(result),
        lambda console: print_planning_benchmark(console, result),
        0 if all(one.identical for one in result.shared) else 1,
    )
    return report.as_json() if json else report
