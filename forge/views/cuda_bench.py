"""The screen of `forge bench cuda`: how long a step takes on this GPU and how near its limits that is, and how requests
fare under load.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.cuda_results import CudaBenchmark, LoadResult, Percentiles, StepResult
from forge.bench.results import FORGE
from forge.views.figures import NOTHING, count, percent
from forge.views.palette import QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line


def print_cuda_benchmark(console: Console, result: CudaBenchmark) -> None:
    """The GPU and who ran on it; steps; loads of requests; what was left out."""
    console.print(Text("How fast is this model on this GPU?", TITLE))
    for line in _headings(result):
        console.print(Text(line, QUIET))
    if result.steps:
        console.print()
        print_table(console, _step_table(result))
    if result.loads:
        console.print()
        print_table(console, _load_table(result.loads))
    for skipped in result.skipped:
        console.print(Text(f"left out: {one_line(skipped.name)}: {one_line(skipped.reason)}", TROUBLE))
    if result.interrupted:
        console.print(Text("interrupted: what was measured until then", TROUBLE))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _headings(result: CudaBenchmark) -> list[str]:
    lines = []
    if result.limits is not None:
        limits = result.limits
        lines.append(f"{limits.device}, {limits.memory_bytes / 2**30:.0f} GiB; {limits.versions}")
        lines.append(
            f"limits measured: copy {limits.copy_bytes_per_second / 1e12:.2f} TB/s, read "
            f"{limits.read_bytes_per_second / 1e12:.2f} TB/s, "
            f"bfloat16 {2 * limits.products_per_second / 1e12:.0f} TFLOP/s"
        )
    for name, about in result.contenders.items():
        lines.append(f"{name}: {one_line(about['description'])}; loaded in {about['seconds']:.1f} s")
    return lines


def _step_table(result: CudaBenchmark) -> Table:
    names = list(dict.fromkeys(step.contender for step in result.steps))
    table = _new_table(["ms per step"], [*names, "of the bandwidth", "forge ran"])
    for case in dict.fromkeys(step.case for step in result.steps):
        cells = [result.step(case, name) for name in names]
        ours = result.step(case, FORGE)
        share = result.bandwidth_share(ours) if ours is not None else None
        table.add_row(
            case.title,
            *map(_step_cell, cells),
            percent(share) if share is not None else NOTHING,
            one_line(ours.setting) if ours is not None else NOTHING,
        )
    return table


def _step_cell(step: StepResult | None) -> str:
    if step is None:
        return NOTHING
    seconds = step.seconds
    return f"{milliseconds(seconds.median)} ({milliseconds(seconds.low)}–{milliseconds(seconds.high)})"


def _load_table(loads: Sequence[LoadResult]) -> Table:
    figures = ["requests", "requests/s", "first token", "per token", "end to end"]
    table = _new_table(["ms (P50, P95)", ""], figures)
    for result in loads:
        table.add_row(
            result.load.title,
            result.contender,
            count(result.load.requests),
            f"{result.requests_per_second:,.1f}",
            *map(_percentiles, (result.first_token, result.per_token, result.end)),
        )
    return table


def _percentiles(values: Percentiles | None) -> str:
    return NOTHING if values is None else f"{milliseconds(values.p50)}, {milliseconds(values.p95)}"


def _new_table(names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table
