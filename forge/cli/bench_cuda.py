"""`forge bench cuda`: forge beside transformers on one GPU."""

from dataclasses import replace
from typing import Annotated

import typer

from forge.cli import options
from forge.cli.running import INTERRUPTED

_MEASURE = "Measurement"


def bench_cuda(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="qwen3-0.6b, qwen3-1.7b or qwen3-4b with random weights; or a model as elsewhere."
        ),
    ] = "qwen3-0.6b",
    type: Annotated[
        str,
        typer.Option("--type", "-t", help="Of random weights: BF16, Q8_0, Q4_0, Q4_K_M, …", rich_help_panel=_MEASURE),
    ] = "BF16",
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="Figures, with commas: decode1@160 … decode64@2048, prefill128, prefill512, 128in1@1, 128in32@4, "
            "512in1@1 … 512in1@128.",
            show_default="all steps, and the loads that are published for the shape",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="transformers, all or none.", show_default="all", rich_help_panel=_MEASURE),
    ] = None,
    kv: options.KvOption = "paged",
    reps: Annotated[
        int | None, typer.Option("--reps", help="Turns per figure; 5 if not given.", rich_help_panel=_MEASURE)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short turns: to see it run.", rich_help_panel=_MEASURE)
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Decode, prefill and whole requests on this GPU, with the share of its measured bandwidth.

    Requests run in process, and over HTTP as clients of `forge serve` see them.

    [dim]forge bench cuda -m qwen3-4b --only 512in1@64,512in1@128[/dim]
    """
    from forge.bench.cuda import Effort, plan_for, run
    from forge.bench.cuda_results import CudaBenchmark, cuda_benchmark_object
    from forge.errors import UsageError
    from forge.views.bench import BenchProgress
    from forge.views.cuda_bench import print_cuda_benchmark
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console

    if reps is not None and reps < 1:
        raise UsageError(f"--reps is at least 1, and {reps} is less")
    effort = Effort.quick() if quick else Effort()
    effort = replace(effort, repetitions=reps) if reps is not None else effort
    plan = plan_for(model, type, only, peer or ["all"], kv, effort)
    _require_gpu()
    result: CudaBenchmark | None = None
    with BenchProgress(open_error_console()) as progress:
        measuring = run(plan, progress)
        try:
            for result in measuring:  # noqa: B007 (the last one is the whole)
                pass
        except KeyboardInterrupt:
            if result is None:
                raise
            result = replace(result, interrupted=True)
        finally:
            measuring.close()
    assert result is not None, "a benchmark has at least a beginning"
    if json:
        open_console().print(to_json(cuda_benchmark_object(result)), soft_wrap=True)
    else:
        print_cuda_benchmark(open_console(), result)
    raise typer.Exit(INTERRUPTED if result.interrupted else 0)


def _require_gpu() -> None:
    """Raises `UsageError` with what is missing, before anything is made or started."""
    from forge.backends.devices import why_not_cuda
    from forge.errors import UsageError

    reason = why_not_cuda()
    if reason is not None:
        raise UsageError(reason.replace("--device cuda", "forge bench cuda").replace(": use --device cpu", ""))
