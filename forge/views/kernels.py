"""The kernels chapter's experiment: one model with more and more rows, against what the machine can do at most."""

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.kernels import KernelsResult, Limits, Measured, Pass
from forge.views.charts import Curve, line_plot, row_of
from forge.views.figures import count, ms, percent, size
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.terminal import print_table

QUESTION = "What does a forward pass wait for?"
BUSY = 1.0
"""Processes that wanted a CPU in the minute before; from there on two threads are in one another's way."""
_HEIGHT = 9
_MAX_WIDTH = 66
_MARKS = "●○◆◇■□"


def kernels_object(result: KernelsResult) -> dict[str, Any]:
    """The experiment as facts. Rates are per second; `memory` and `arithmetic` are shares of the machine's limits."""
    limits = result.limits
    return {
        "bytes_per_second": limits.bytes_per_second,
        "products_per_second": limits.products_per_second,
        "ridge": limits.ridge,
        "models": [_model_object(model, limits) for model in result.models],
    }


def _model_object(model: Measured, limits: Limits) -> dict[str, Any]:
    return {
        "name": model.name,
        "weight_bytes": model.size.weight_bytes,
        "threads": model.threads,
        "passes": [
            {
                "rows": found.rows,
                "bytes_read": found.bytes_read,
                "products": found.products,
                "ms": found.seconds * 1e3,
                "ms_per_row": found.seconds * 1e3 / found.rows,
                "bytes_per_second": found.bytes_per_second,
                "products_per_second": found.products_per_second,
                "intensity": found.intensity,
                "bound": found.bound(limits),
                "share": found.share(limits),
            }
            for found in model.passes
        ],
    }


def print_kernels(console: Console, result: KernelsResult) -> None:
    """The limits, a table per model, the roofline with every pass on it, and what it shows."""
    limits = result.limits
    console.print(Text(QUESTION, TITLE))
    console.print()
    console.print(limits_sentence(limits))
    if result.load_average is not None and result.load_average > BUSY:
        busy = f"Something else keeps this machine busy (load {result.load_average:.1f}): take the figures with care."
        console.print(Text(busy, TROUBLE))
    for model in result.models:
        console.print()
        reads = f"every pass reads {size(model.passes[0].bytes_read)} of weights, {_threads(model.threads)}"
        console.print(Text.assemble((model.name, TITLE), (f"  {reads}", QUIET)))
        print_table(console, _table(model, limits))
    console.print()
    for line in roofline(result, console.width):
        console.print(line)
    console.print()
    for model in result.models:
        console.print(growth_sentence(model))
    for sentence in (*comparison_sentences(result.models), *cache_sentences(result)):
        console.print(sentence)


def limits_sentence(limits: Limits) -> str:
    memory, products = limits.bytes_per_second / 1e9, limits.products_per_second / 1e9
    return (
        f"This machine reads {memory:.1f} GB/s from memory and does {products:,.0f} G int8 products/s: "
        f"{limits.ridge:.1f} products in the time of one byte."
    )


def growth_sentence(model: Measured) -> str:
    """How long rows take alone and together."""
    one, most = model.passes[0], model.passes[-1]
    if most is one:
        return f"{model.name}: one row takes {ms(one.seconds * 1e3)} ms."
    together = most.seconds / one.seconds
    return (
        f"{model.name}: {count(most.rows)} rows take {together:.1f} times as long as one, so a row among many costs "
        f"{percent(together / most.rows)} of a row alone."
    )


def comparison_sentences(models: Sequence[Measured]) -> list[str]:
    """The second model and on against the first, with one row and with many."""
    sentences = []
    for other in models[1:]:
        first = models[0]
        fewer = first.passes[0].bytes_read / other.passes[0].bytes_read
        alone = first.passes[0].seconds / other.passes[0].seconds
        many = first.passes[-1].seconds / other.passes[-1].seconds
        sentences.append(
            f"{other.name} has {fewer:.2f} times fewer bytes to read than {first.name}. With one row it is "
            f"{alone:.2f} times as fast, with {count(other.passes[-1].rows)} rows {many:.2f} times."
        )
    return sentences


def cache_sentences(result: KernelsResult) -> list[str]:
    """A word where weights came faster than memory delivers."""
    memory = result.limits.bytes_per_second
    quick = [model.name for model in result.models if model.passes[0].bytes_per_second > 1.1 * memory]
    if not quick:
        return []
    return [f"More than memory delivers: {', '.join(quick)} stays in the processor's own cache between two passes."]


def roofline(result: KernelsResult, width: int) -> list[Text]:
    """Products per second over products per byte, both logarithmic: the roof, and a mark for every pass."""
    limits = result.limits
    room = max(24, min(_MAX_WIDTH, width - 14))
    every = [found for model in result.models for found in model.passes]
    low, high = (math.log10(pick(found.intensity for found in every)) for pick in (min, max))
    low, high = min(low, math.log10(limits.ridge) - 0.2), max(high, math.log10(limits.ridge) + 0.5)
    top = math.log10(max(limits.products_per_second, *(found.products_per_second for found in every)))
    bottom = math.log10(min(found.products_per_second for found in every)) - 0.15
    roof = [
        max(0.0, min(math.log10(limits.products_per_second), math.log10(limits.bytes_per_second) + x) - bottom)
        for x in (low + (high - low) * column / (room * 2 - 1) for column in range(room * 2))
    ]
    lines = line_plot([Curve(roof, QUIET)], top - bottom, room * 2, room, _HEIGHT)
    marks: dict[tuple[int, int], tuple[str, str]] = {}
    for index, model in enumerate(result.models):
        for found in model.passes:
            column = round((math.log10(found.intensity) - low) / (high - low) * (room - 1))
            row = row_of(max(0.0, math.log10(found.products_per_second) - bottom), top - bottom, _HEIGHT)
            marks[row, column] = (_MARKS[index % len(_MARKS)], sequence_style(index))
    labels = [f"{10**top / 1e9:,.0f}", *[""] * (_HEIGHT - 2), f"{10**bottom / 1e9:,.1f}"]
    plot = [Text("G products/s", QUIET)]
    for row, (label, line) in enumerate(zip(labels, lines, strict=True)):
        edge = (f"{label:>6} ┤" if label else " " * 6 + " │", QUIET)
        plot.append(Text.assemble(edge, *_marked(line, row, marks)))
        plot[-1].rstrip()
    axis = f"{10**low:.1f}{'products per byte':^{max(0, room - 8)}}{10**high:>5.0f}"
    plot.append(Text(" " * 8 + axis, QUIET))
    legend = Text(" " * 8)
    for index, model in enumerate(result.models):
        rows = f" {model.name}, {model.passes[0].rows} to {model.passes[-1].rows} rows   "
        legend.append(_MARKS[index % len(_MARKS)], sequence_style(index)).append(rows)
    legend.rstrip()
    plot.append(legend)
    return plot


def _marked(line: Text, row: int, marks: dict[tuple[int, int], tuple[str, str]]) -> list[tuple[str, str]]:
    """A line of the plot with the marks that lie on it."""
    return [marks.get((row, column), (character, QUIET)) for column, character in enumerate(line.plain)]


def _table(model: Measured, limits: Limits) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    for heading in ("rows", "ms", "ms per row", "GB/s", "G products/s", "of the limit"):
        table.add_column(heading, justify="left" if heading == "of the limit" else "right", no_wrap=True)
    for found in model.passes:
        table.add_row(*_cells(found, limits))
    return table


def _cells(found: Pass, limits: Limits) -> list[Text | str]:
    milliseconds = found.seconds * 1e3
    share = Text(f"{percent(found.share(limits)):>6}  {found.bound(limits)}", ACCENT)
    return [
        count(found.rows),
        f"{milliseconds:.2f}",
        f"{milliseconds / found.rows:.3f}",
        f"{found.bytes_per_second / 1e9:.1f}",
        f"{found.products_per_second / 1e9:,.0f}",
        share,
    ]


def _threads(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"
