"""`forge cuda`: the GPU chapter. Its experiment: what does a forward wait for there, and what are graphs worth?

Where there is no GPU it shows a run that was recorded on one (`--record` on such a machine wrote it), or else what
follows from a model's sizes and a GPU's published limits; and says which.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found, drive, exit_status, load_model, run_label

if TYPE_CHECKING:
    from forge.backends.cuda.backend import CudaBackend
    from forge.views.cuda import Measured
    from forge.views.report import Report
    from forge.views.summary import RunResult

LIMIT_BYTES, LIMIT_SECONDS = 1 << 30, 0.3
"""How much of the GPU's limits is measured here: enough for a picture. `forge bench cuda` measures them well."""
WARM_RUNS = 2
"""Before the one that counts: kernels are compiled, then graphs captured."""
RECORDED = Path(__file__).resolve().parents[1] / "book" / "cuda_run.json"
"""What a machine with a GPU measured, if any has."""


def cuda(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    model: options.ModelOption = "tales",
    threads: options.ThreadsOption = None,
    kernels: Annotated[
        str | None,
        typer.Option("--kernels", help="triton, or torch: every operation by itself.", rich_help_panel="Model"),
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option("--graphs/--no-graphs", help="Run with captured graphs too.", rich_help_panel="Model"),
    ] = True,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Save what was measured, for machines without a GPU.",
            dir_okay=False,
            rich_help_panel="Output",
        ),
    ] = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    """10. The same prompt on a GPU: launches, graphs, bandwidth.

    [dim]forge cuda --only run "Once upon a time" 32[/dim]
    """
    if record is None and reads_chapter(only, json):
        return read_chapter(ctx, pause)
    from forge.backends.devices import check_device, why_not_cuda
    from forge.errors import UsageError

    check_device("cuda", kernels=kernels)
    reason = why_not_cuda()
    if reason is not None and record is not None:
        raise UsageError(reason.replace("--device cuda", "forge cuda --record").replace(": use --device cpu", ""))
    if reason is not None:
        report = _report(_recorded())
    else:
        report = _measure(prompt, max_tokens, model, threads, kernels, graphs)
        if record is not None:
            _save(report, record)
    return report.as_json() if json else report


def _report(measured: "Measured | None", *results: "RunResult") -> "Report":
    from forge.bench.cuda_plan import SHAPE, planned_steps
    from forge.model.synth import SHAPES
    from forge.views.cuda import cuda_object, print_cuda
    from forge.views.report import Report

    steps = planned_steps(SHAPES[SHAPE])
    return Report(
        cuda_object(measured, steps), lambda console: print_cuda(console, measured, steps), exit_status(*results)
    )


def _measure(
    prompt: str, max_tokens: int, model: str, threads: int | None, kernels: str | None, graphs: bool
) -> "Report":
    from datetime import date

    from forge.bench.cuda_limits_worker import measure
    from forge.bench.cuda_plan import Limits
    from forge.model.qwen3 import Qwen3
    from forge.views.cuda import DeviceRun, Measured, Work

    text = options.read_prompt(prompt)
    params = options.sampling_params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    on_cpu = load_model(model, kv="basic", device="cpu", **options.model_options(threads=threads))
    results = [("cpu", "c", _warm_run(on_cpu, text, params))]
    on_gpu = load_model(model, kv="basic", device="cuda", **options.model_options(kernels=kernels))
    assert isinstance(on_gpu.model, Qwen3)
    backend = cast("CudaBackend", on_gpu.model.backend)
    by_itself = "cuda, torch" if kernels == "torch" else "cuda, kernel by kernel"
    for name, mark, captured in ((by_itself, "k", False), ("cuda, graphs", "g", True)):
        if captured and not (graphs and backend.can_capture):
            continue
        backend.uses_graphs = captured
        results.append((name, mark, _warm_run(on_gpu, text, params)))
    found = measure(LIMIT_BYTES, LIMIT_SECONDS)
    matrices = backend.matrices
    measured = Measured(
        str(run_label(on_gpu)),
        tuple(DeviceRun.of(*each) for each in results),
        Work(sum(m.read_bytes for m in matrices), sum(m.num_weights for m in matrices)),
        Limits(found["device"], found["read_bytes_per_second"], 2 * found["products_per_second"]),
        date.today().isoformat(),
    )
    return _report(measured, *(result for _, _, result in results))


def _warm_run(llm, text: str, params) -> "RunResult":
    """The run, once everything is compiled and captured. As tokens are asked for their probabilities, no step is
    launched before the one ahead of it was read, and each forward's time is its own."""
    for _ in range(WARM_RUNS + 1):
        result = drive(llm, llm.start([text], params), params, lambda record: None)
        if result.interrupted:
            break
    return result


def _recorded() -> "Measured | None":
    """The run that comes with forge, if one does. Raises `UsageError` if it cannot be read."""
    from json import JSONDecodeError, loads

    from forge.errors import UsageError
    from forge.views.cuda import measured_from

    if not RECORDED.exists():
        return None
    try:
        return measured_from(loads(RECORDED.read_text(encoding="utf-8")))
    except (JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{RECORDED} is no run that forge cuda --record wrote: {error}") from None


def _save(report: "Report", path: Path) -> None:
    """Raises `UsageError` where the file cannot be written."""
    from forge.errors import UsageError
    from forge.views.json_output import to_json

    try:
        path.write_text(to_json(report.facts) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
