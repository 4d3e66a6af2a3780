"""The GPU chapter's experiment: the same prompt on the CPU and on the GPU, with its steps launched one kernel at a time
and as graphs. What does a forward cost there, and what does it wait for?
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.views.figures import ms, plural, rate, times
from forge.views.forwards import spaced
from forge.views.palette import ACCENT, QUIET, TITLE
from forge.views.summary import RunResult
from forge.views.terminal import print_table
from forge.views.text import one_line

QUESTION = "The same prompt on a GPU: what does a forward wait for there?"
LEADS_ON = "Many sequences share one pass over the weights:\n  forge bench cuda --only decode1@160,decode16@160"
ROWS = 10
HEIGHT, LEFT = 12, 11


@dataclass(frozen=True)
class DeviceRun:
    """One way of running the prompt."""

    name: str
    """`cpu`, `cuda, kernel by kernel`, `cuda, graphs`."""
    mark: str
    """Its character in the roofline picture."""
    result: RunResult
    modes: tuple[str, ...] = ()
    """How each forward was launched, where the device says: `graph` or `eager`."""


@dataclass(frozen=True)
class Roof:
    """What the GPU can do at most, as measured."""

    device: str
    bytes_per_second: float
    operations_per_second: float
    """bfloat16 multiplications and additions, counted separately."""


@dataclass(frozen=True)
class Work:
    """What a forward of this model has to do: to read all weights once, and to multiply them by every row."""

    weight_bytes: int
    weights: int

    def intensity(self, rows: int) -> float:
        """Operations per byte read."""
        return 2 * self.weights * rows / self.weight_bytes

    def operations(self, rows: int) -> int:
        return 2 * self.weights * rows


def print_cuda(console: Console, runs: Sequence[DeviceRun], work: Work, roof: Roof) -> None:
    """The whole experiment: per-forward times side by side, what graphs are worth, the roofline."""
    console.print(Text(QUESTION, TITLE))
    console.print(Text(f"{roof.device}; {one_line(str(runs[0].result.label.model))}", QUIET))
    console.print()
    print_table(console, _forward_table(runs))
    console.print()
    for sentence in sentences(runs, work, roof):
        console.print(sentence)
    console.print()
    for line in roofline_lines(runs, work, roof, console.width):
        console.print(line)
    console.print()
    console.print(Text(LEADS_ON, ACCENT))


def cuda_object(runs: Sequence[DeviceRun], work: Work, roof: Roof) -> dict[str, Any]:
    """The same for programs; nothing rounded."""
    return {
        "device": roof.device,
        "bytes_per_second": roof.bytes_per_second,
        "operations_per_second": roof.operations_per_second,
        "weight_bytes": work.weight_bytes,
        "weights": work.weights,
        "runs": [
            {
                "name": run.name,
                "median_decode_ms": _decode_ms(run.result),
                "forward_ms": list(run.result.forward_ms),
                "modes": list(run.modes),
                "token_ids": list(run.result.output.outputs[0].token_ids),
            }
            for run in runs
        ],
    }


def sentences(runs: Sequence[DeviceRun], work: Work, roof: Roof) -> list[str]:
    """What the table says, in words and figures."""
    middles = {run.name: _decode_ms(run.result) for run in runs}
    said = [f"{name}: {ms(value)} ms per decode at the median" for name, value in middles.items() if value]
    floor = work.weight_bytes / roof.bytes_per_second * 1e3
    said.append(
        f"Reading every weight once takes {ms(floor)} ms at the bandwidth that was measured; no decode is faster."
    )
    *_, eager, graphs = middles.values()
    if eager and graphs:
        said.append(f"Launching a step as one graph instead of kernel by kernel: {times(eager / graphs)} as fast.")
    tokens = [run.result.output.outputs[0].token_ids for run in runs]
    said.append(_agreement(tokens, runs))
    return said


def roofline_lines(runs: Sequence[DeviceRun], work: Work, roof: Roof, width: int) -> list[Text]:
    """Operations per second over operations per byte, both logarithmic (Williams, Waterman and Patterson 2009).

    The roof is the lower of two limits: bandwidth times intensity, and the rate of multiplication.
    """
    points = [(run.mark, rows, milliseconds) for run in runs for rows, milliseconds in _points(run)]
    places = [(mark, work.intensity(rows), work.operations(rows) / (m / 1e3)) for mark, rows, m in points]
    ridge = roof.operations_per_second / roof.bytes_per_second
    x_low = math.log10(min(1.0, *(x for _, x, _ in places)))
    x_high = math.log10(max(ridge * 4, *(x for _, x, _ in places)))
    y_high = math.log10(roof.operations_per_second)
    y_low = min(math.floor(math.log10(min(y for _, _, y in places))), y_high - 1)
    columns = max(20, width - LEFT)
    grid = [[" "] * columns for _ in range(HEIGHT)]

    def row_of(y: float) -> int:
        return min(HEIGHT - 1, max(0, round((y_high - math.log10(y)) / (y_high - y_low) * (HEIGHT - 1))))

    for column in range(columns):
        x = 10 ** (x_low + (x_high - x_low) * column / (columns - 1))
        limit = min(roof.operations_per_second, x * roof.bytes_per_second)
        if math.log10(limit) >= y_low:
            grid[row_of(limit)][column] = "─" if x >= ridge else "╱"
    for mark, x, y in places:
        column = round((math.log10(x) - x_low) / (x_high - x_low) * (columns - 1))
        grid[row_of(y)][column] = mark
    labels = {0: _operations(10**y_high), HEIGHT - 1: _operations(10**y_low)}
    lines = [Text(f"{labels.get(row, ''):>{LEFT - 2}} │{''.join(cells)}".rstrip()) for row, cells in enumerate(grid)]
    scale = f"{10**x_low:.1g}".ljust(columns - 8) + f"{10**x_high:,.0f}".rjust(8)
    marks = "   ".join(f"{run.mark} {run.name}" for run in runs)
    return [*lines, Text(" " * (LEFT - 1) + "└" + scale), Text(f"operations per byte read   {marks}", QUIET)]


def _points(run: DeviceRun) -> list[tuple[int, float]]:
    """(rows, milliseconds) of the prefill, and of the median decode."""
    prefills = [(f.tokens, f.ms) for f in run.result.forwards if f.phase == "prefill" and f.ms > 0]
    decode = _decode_ms(run.result)
    return prefills[:1] + ([(1, decode)] if decode else [])


def _decode_ms(result: RunResult) -> float | None:
    """The median forward of one token."""
    decodes = sorted(forward.ms for forward in result.forwards if forward.phase == "decode")
    return decodes[len(decodes) // 2] if decodes else None


def _forward_table(runs: Sequence[DeviceRun]) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column("ms per forward", no_wrap=True)
    for run in runs:
        table.add_column(run.name, justify="right")
    shown = spaced(runs[0].result.forwards, ROWS)
    for forward in shown:
        if forward is None:
            table.add_row("…")
            continue
        index = forward.number - 1
        table.add_row(f"{forward.phase} {plural(forward.tokens, 'token')}", *(_cell(run, index) for run in runs))
    return table


def _cell(run: DeviceRun, index: int) -> str:
    if index >= len(run.result.forwards):
        return ""
    mode = run.modes[index] if index < len(run.modes) else ""
    return f"{ms(run.result.forwards[index].ms)} {mode}".rstrip()


def _agreement(tokens: Sequence[Sequence[int]], runs: Sequence[DeviceRun]) -> str:
    """Whether the runs said the same. They need not: their sums are added in other orders, in other precisions."""
    shortest = min(map(len, tokens))
    for position in range(shortest):
        if len({each[position] for each in tokens}) > 1:
            return f"The texts agree in their first {plural(position, 'token')}, then a near tie fell the other way."
    return f"All {len(runs)} runs chose the same {plural(shortest, 'token')}."


def _operations(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= limit:
            return f"{rate(value / limit)} {unit}/s"
    return f"{value:.0f} /s"
