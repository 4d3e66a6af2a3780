"""10. The same prompt on a GPU: launches, graphs, bandwidth.

[dim]forge cuda --only run "Once upon a time" 32[/dim]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from json import JSONDecodeError, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from rich.text import Text

from forge.cache.kv_storage import DEFAULT_KV_DTYPES
from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.run_control import create_llm, drive, exit_status, run_label
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.cuda.plan import H200, SHAPE, Limits, PlannedStep, planned_steps
from forge.option import option
from forge.views.charts import Point, roofline
from forge.views.formatting import ms, plural, size, times
from forge.views.forwards import spaced
from forge.views.json_output import as_object, picked, to_json
from forge.views.palette import ACCENT
from forge.views.screen import Part, Report, Table, leads_on, report, sentences, title
from forge.views.summary import Forward, RunResult
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.backends.cuda.backend import CudaBackend

LIMIT_BYTES, LIMIT_SECONDS = 1 << 30, 0.3
"""Array size and seconds for measuring the GPU's limits here: enough for a picture. `forge bench cuda` measures them
well."""
WARM_RUNS = 2
"""Runs before the one that counts: kernels are compiled, then graphs captured."""
RECORDED = Path(__file__).with_name("recorded_run.json")
"""The results of a machine with a GPU, if one has measured any."""
QUESTION = "The same prompt on a GPU: what does a forward wait for there?"
LEADS_ON = "Many sequences share one pass over the weights:\n  forge bench cuda --only decode1@160,decode16@160"
COMPUTED = (
    "There is no GPU here, and no run on one has been recorded: nothing below was measured. It is worked out from the "
    f"sizes of {SHAPE} in bfloat16 and the published limits of an {H200.device}."
)
ROWS = 10
DRAWN = {"decode1@160": "1", "decode16@160": "2", "decode64@160": "3", "prefill512": "p"}
"""Planned steps in the roofline picture, and their characters there."""
Source = Literal["measured", "recorded"]


@dataclass(frozen=True)
class CudaArgs:
    """How the experiment runs, and where it is saved."""

    graphs: bool = option(True, "Run with captured graphs too.", "Model")
    record: Path | None = option(None, "Save what was measured, for machines without a GPU.", "Output")


@experiment()
def cuda(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    *,
    engine: Annotated[EngineArgs, Takes("model threads kernels", kv="basic", device="cuda")],
    asked: CudaArgs,
) -> Experiment:
    def measure() -> Report:
        from forge.backends.devices import why_not_cuda

        reason = why_not_cuda()
        if reason is None:
            report = _measure(options.read_prompt(prompt), max_tokens, engine, asked.graphs)
            if asked.record is not None:
                _save(report, asked.record)
            return report
        if asked.record is not None:
            raise UsageError(reason.replace("--device cuda", "forge cuda --record").replace(": use --device cpu", ""))
        return _report(_recorded())

    return Experiment(measure, alone=asked.record is not None)


def _report(measured: "Measured | None", *results: RunResult) -> Report:
    from forge.model.synth import SHAPES

    steps = planned_steps(SHAPES[SHAPE])
    return report(cuda_object(measured, steps), lambda: screen(measured, steps), exit_status(*results))


def _measure(text: str, max_tokens: int, engine: EngineArgs, graphs: bool) -> Report:
    from forge.bench.limits_worker import measure_gpu
    from forge.model.qwen3 import Qwen3

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    on_cpu = create_llm(engine, device="cpu", kernels=None, kv_dtype=engine.kv_dtype or DEFAULT_KV_DTYPES["cuda"])
    results = [("cpu", "c", _warm_run(on_cpu, text, params))]
    on_gpu = create_llm(engine, threads=None)
    assert isinstance(on_gpu.model, Qwen3)
    backend = cast("CudaBackend", on_gpu.model.backend)
    by_itself = "cuda, torch" if engine.kernels == "torch" else "cuda, kernel by kernel"
    for name, mark, captured in ((by_itself, "k", False), ("cuda, graphs", "g", True)):
        if captured and not (graphs and backend.can_capture):
            continue
        backend.uses_graphs = captured
        results.append((name, mark, _warm_run(on_gpu, text, params)))
    limits = measure_gpu(LIMIT_BYTES, LIMIT_SECONDS)
    matrices = backend.matrices
    runs = tuple(DeviceRun.of(*run) for run in results)
    work = sum(matrix.read_bytes for matrix in matrices), sum(matrix.num_weights for matrix in matrices)
    roof = Limits(limits["device"], limits["read_bytes_per_second"], 2 * limits["products_per_second"])
    measured = Measured(str(run_label(on_gpu)), runs, *work, roof, date.today().isoformat())
    return _report(measured, *(result for _, _, result in results))


def _warm_run(llm, text: str, params) -> RunResult:
    """Run once everything is compiled and captured. The tokens' probabilities are requested, so no step is launched
    before the previous one was read, and each forward has a time of its own."""
    for _ in range(WARM_RUNS + 1):
        result = drive(llm, llm.start([text], params))
        if result.interrupted:
            break
    return result


def _recorded() -> "Measured | None":
    """Return the recorded run that comes with forge, or None. Raises `UsageError` if it cannot be read."""
    if not RECORDED.exists():
        return None
    try:
        return measured_from(loads(RECORDED.read_text(encoding="utf-8")))
    except (JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{RECORDED} is no run that forge cuda --record wrote: {error}") from None


def _save(report: Report, path: Path) -> None:
    """Write what was measured to a file; what is computed can be computed again. Raises `UsageError` if that fails."""
    measured = {name: value for name, value in report.facts.items() if name not in ("published", "steps")}
    try:
        path.write_text(to_json(measured) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class DeviceRun:
    """One way of running the prompt."""

    name: str
    """`cpu`, `cuda, kernel by kernel`, `cuda, graphs`."""
    mark: str
    """Its character in the roofline picture."""
    forwards: tuple[Forward, ...]
    token_ids: tuple[int, ...]
    modes: tuple[str, ...] = ()
    """How each forward was launched, where the device says: `graph` or `eager`."""

    @classmethod
    def of(cls, name: str, mark: str, result: RunResult) -> "DeviceRun":
        launched = [record.execution.mode for record in result.records if record.execution is not None]
        return cls(name, mark, result.forwards, tuple(result.output.outputs[0].token_ids), tuple(launched))

    @property
    def decode_ms(self) -> float | None:
        """The median forward of one token."""
        decodes = sorted(forward.ms for forward in self.forwards if forward.phase == "decode")
        return decodes[len(decodes) // 2] if decodes else None

    def cell(self, index: int) -> str:
        """Format a forward's time, and how it was launched."""
        if index >= len(self.forwards):
            return ""
        mode = self.modes[index] if index < len(self.modes) else ""
        return f"{ms(self.forwards[index].ms)} {mode}".rstrip()


@dataclass(frozen=True)
class Measured:
    """Runs of one prompt, on a GPU whose limits were measured beside them."""

    model: str
    runs: tuple[DeviceRun, ...]
    weight_bytes: int
    weights: int
    """A forward reads all weights once, and multiplies them by every row."""
    limits: Limits
    on: str
    """The day, as 2026-11-20."""
    source: Source = "measured"

    @property
    def floor_ms(self) -> float:
        """Milliseconds to read the weights once."""
        return self.weight_bytes / self.limits.bytes_per_second * 1e3


def screen(measured: Measured | None, steps: Sequence[PlannedStep]) -> Iterator[Part]:
    """Draw the whole experiment: the times of the forwards side by side, the gain of graphs, the roofline; or the
    planned steps."""
    yield title(QUESTION)
    yield from _planned_parts(steps) if measured is None else _measured_parts(measured)
    yield leads_on(LEADS_ON)


def _measured_parts(measured: Measured) -> Iterator[Part]:
    yield f"{measured.limits.device}; {one_line(measured.model)}"
    if measured.source == "recorded":
        yield title(f"A recorded run, of {measured.on}: there is no GPU here.", ACCENT)
    rows = [
        (f"{forward.phase} {plural(forward.tokens, 'token')}", *(run.cell(forward.number - 1) for run in measured.runs))
        for forward in spaced(measured.runs[0].forwards, ROWS)
    ]
    yield from (None, Table(("ms per forward", *(run.name for run in measured.runs)), rows))
    yield from (None, *sentences(measured_sentences(measured)), None)
    yield lambda width: picture(_points(measured), measured.limits, width)


def _planned_parts(steps: Sequence[PlannedStep]) -> Iterator[Part]:
    shown = {"floor": lambda step: f"{step.floor_ms(H200):.2f}", "bound": _bound}
    columns = ["step: {title}", "kernels: {num_launches:count}", "reads: {bytes:size}"]
    yield from (title(COMPUTED, ACCENT), None)
    yield Table.of(steps, *columns, "floor, ms: {:floor}", "bound by: {:bound}", formats=shown)
    yield from (None, *sentences(planned_sentences(steps)), None)
    drawn = [
        Point(DRAWN[step.name], step.title, step.intensity, step.operations / step.floor_ms(H200) * 1e3)
        for step in steps
        if step.name in DRAWN
    ]
    yield lambda width: picture(drawn, H200, width)


def picture(points: Sequence[Point], limits: Limits, width: int) -> list[Text]:
    return roofline(points, limits.bytes_per_second, limits.operations_per_second, "operations", width)


def cuda_object(measured: Measured | None, steps: Sequence[PlannedStep]) -> dict[str, Any]:
    """Return the facts, unrounded. `runs` is empty if nothing was measured or recorded. A step's key is a name that a
    chapter's text can refer to: `decode1_160` for `decode1@160`."""
    planned = {
        step.name.replace("@", "_"): as_object(step, "intensity", "num_launches", without=("name",))
        | {"floor_ms": step.floor_ms(H200), "bound": _bound(step)}
        for step in steps
    }
    numbers = ("weight_bytes", "weights", "floor_ms")
    facts: dict[str, Any] = {"source": "computed", "on": None, "model": SHAPE, **as_object(H200)}
    facts |= dict.fromkeys(numbers) | {"runs": []}
    if measured is not None:
        facts |= picked(measured, "source", "on", "model", *numbers) | as_object(measured.limits)
        facts["runs"] = [_run_object(run) for run in measured.runs]
    return facts | {"published": H200.device, "steps": planned}


def measured_from(facts: Mapping[str, Any]) -> Measured:
    """Read a recorded run back from what `cuda_object` returned. Raises `KeyError` or `TypeError` for anything else."""
    runs = []
    for run in facts["runs"]:
        forwards = tuple(Forward(number, *forward) for number, forward in enumerate(run["forwards"], start=1))
        runs.append(DeviceRun(run["name"], run["mark"], forwards, tuple(run["token_ids"]), tuple(run["modes"])))
    work = facts["weight_bytes"], facts["weights"]
    limits = Limits(facts["device"], facts["bytes_per_second"], facts["operations_per_second"])
    return Measured(facts["model"], tuple(runs), *work, limits, facts["on"], "recorded")


def _run_object(run: DeviceRun) -> dict[str, Any]:
    return as_object(run, without=("forwards",)) | {
        "median_decode_ms": run.decode_ms,
        "forward_ms": [forward.ms for forward in run.forwards],
        "forwards": [[forward.phase, forward.tokens, forward.ms] for forward in run.forwards],
    }


def measured_sentences(measured: Measured) -> list[str]:
    """Say in sentences what the table of runs shows."""
    middles = {run.name: run.decode_ms for run in measured.runs}
    lines = [f"{name}: {ms(value)} ms per decode at the median" for name, value in middles.items() if value]
    lines.append(
        f"Reading every weight once takes {ms(measured.floor_ms)} ms at the bandwidth that was measured; no decode is "
        "faster."
    )
    eager, graphs = (next((run.decode_ms for run in measured.runs if run.mark == mark), None) for mark in "kg")
    if eager and graphs:
        lines.append(f"Launching a step as one graph instead of kernel by kernel: {times(eager / graphs)} as fast.")
    lines.append(_agreement(measured.runs))
    return lines


def planned_sentences(steps: Sequence[PlannedStep]) -> list[str]:
    """Say in sentences what the table of planned steps shows."""
    by_name = {step.name: step for step in steps}
    single, many = by_name["decode1@160"], by_name["decode64@160"]
    lines = [
        f"A decode of one row reads {size(single.bytes)}: {single.floor_ms(H200):.2f} ms at the published bandwidth, "
        "and no decode can be faster.",
        f"{many.rows} rows read the same weights: {many.floor_ms(H200):.2f} ms for {many.rows} tokens, not for one.",
    ]
    if single.launches is None:
        return [*lines, "Which kernels a step launches is asked of torch and Triton, which are not installed here."]
    listed = ", ".join(f"{times_} {name}" for name, times_ in single.launches.items())
    lines.append(f"It is {single.num_launches} launches kernel by kernel: {listed}. As a graph it is one.")
    return lines


def _points(measured: Measured) -> list[Point]:
    """Return the prefill and the median decode of each run as points of the roofline."""
    points = []
    for run in measured.runs:
        prefills = [(f.tokens, f.ms) for f in run.forwards if f.phase == "prefill" and f.ms > 0]
        for rows, milliseconds in prefills[:1] + ([(1, run.decode_ms)] if run.decode_ms else []):
            operations = 2 * measured.weights * rows
            intensity, per_second = operations / measured.weight_bytes, operations / (milliseconds / 1e3)
            points.append(Point(run.mark, run.name, intensity, per_second))
    return points


def _bound(step: PlannedStep) -> str:
    return "memory" if step.is_bound_by_memory(H200) else "arithmetic"


def _agreement(runs: Sequence[DeviceRun]) -> str:
    """Say whether the runs gave the same tokens. They need not: they add in different orders and precisions."""
    shortest = min(len(run.token_ids) for run in runs)
    for position in range(shortest):
        if len({run.token_ids[position] for run in runs}) > 1:
            return f"The texts agree in their first {plural(position, 'token')}, then a near tie fell the other way."
    return f"All {len(runs)} runs chose the same {plural(shortest, 'token')}."
