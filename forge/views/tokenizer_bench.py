"""The screen of `forge bench tokenizer`."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.tokenizer import BATCH_INPUT, ENCODES, THREADS, Times, TokenizerBenchmark
from forge.views.bench import ratio_text
from forge.views.figures import count
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line


def print_tokenizer_benchmark(console: Console, result: TokenizerBenchmark) -> None:
    console.print(Text("How fast is text turned into tokens, and back?", TITLE))
    on = f" on {one_line(result.machine)}" if result.machine else ""
    console.print(
        Text(f"{one_line(result.source)}, {count(result.vocabulary)} tokens{on}; µs per call, medians", QUIET)
    )
    if result.fallback_reason is not None:
        console.print(Text(f"the fast path is not used: {one_line(result.fallback_reason)}", TROUBLE))
    console.print(Text("✓ equal ids and texts on every input, and from 8 threads at once", GOOD))
    for title, rows in (("encode", result.encode), ("decode", result.decode)):
        console.print()
        print_table(console, _table(title, rows))
    console.print()
    others = [
        Times(f"encode a batch of {one.name}", one.chars, one.tokens, one.theirs, one.ours) for one in result.batch
    ]
    others.append(_named(result.concurrent, f"{THREADS} threads x {ENCODES} encodes, per encode"))
    others.append(_named(result.streaming, "streaming decode, per token"))
    others.append(_named(result.load, "load"))
    table = _new_table("", "tokenizers", "fast path", "faster")
    for one in others:
        table.add_row(one.name, _microseconds(one.theirs), _microseconds(one.ours), f"{ratio_text(one.speed_up)} x")
    print_table(console, table)
    console.print(Text(f"Batches and threads: {BATCH_INPUT}. Both are called from Python.", QUIET))


def _table(title: str, rows: Sequence[Times]) -> Table:
    table = _new_table(title, "chars", "tokens", "tokenizers", "fast path", "faster")
    for one in rows:
        table.add_row(
            one.name,
            count(one.chars),
            count(one.tokens),
            _microseconds(one.theirs),
            Text(_microseconds(one.ours), ACCENT),
            f"{ratio_text(one.speed_up)} x",
        )
    return table


def _named(times: Times, name: str) -> Times:
    return Times(name, times.chars, times.tokens, times.theirs, times.ours)


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"


def _new_table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
