"""The screen of `forge bench cache`: what paging costs, what it saves, and what keeping a prefix saves."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.cache import CacheBenchmark
from forge.bench.results import Middle
from forge.views.bench import middle, ratio_text
from forge.views.figures import NOTHING, count, plural, rate, share, size
from forge.views.palette import QUIET, TITLE
from forge.views.terminal import print_table
from forge.views.text import one_line


def print_cache_benchmark(console: Console, result: CacheBenchmark) -> None:
    """Time, then memory, then hits; each table with what its figures are."""
    console.print(Text("What does paging cost, and what does it save?", TITLE))
    on = f" on {one_line(result.machine)}" if result.machine else ""
    console.print(Text(f"{one_line(result.model)}, {one_line(result.device)}{on}", QUIET))
    for print_part in (_print_steps, _print_first_token, _print_policy, _print_waste, _print_hits):
        console.print()
        print_part(console, result)


def _print_steps(console: Console, result: CacheBenchmark) -> None:
    table = _new_table("decode at", "block", "cache", "ms per step", "of contiguous")
    for one in result.step_times:
        table.add_row(
            f"{count(one.length)} tokens", str(one.block_size), "contiguous", _milliseconds(one.basic), NOTHING
        )
        table.add_row("", "", "paged", _milliseconds(one.paged), _ratio(one.ratio))
        table.add_row("", "", "scattered", _milliseconds(one.scattered), _ratio(one.scattered_ratio))
    print_table(console, table)
    turns = plural(result.steps, "step")
    _say(
        console,
        f"One sequence, whole steps: scheduling, forward pass, choice. {turns} of each, in turn, from the same prompt; "
        "medians (quartiles), the ratio taken step by step. scattered: paged, its blocks in no order.",
    )
    for reason in result.skipped:
        _say(console, f"· {reason}")


def _print_first_token(console: Console, result: CacheBenchmark) -> None:
    one = result.first_token
    if one is None:
        return _say(console, "· time to first token: the model's context is too short")
    table = _new_table("ms to first token", "paged", "prefix", "sooner")
    found = f"{count(one.cached_tokens)} of {count(one.prompt_tokens)} found"
    table.add_row(found, _milliseconds(one.paged), _milliseconds(one.prefix), _ratio(one.ratio))
    print_table(console, table)


def _print_policy(console: Console, result: CacheBenchmark) -> None:
    table = _new_table("policy alone", "", "")
    for one in result.bookkeeping:
        name = f"bookkeeping of a step, {plural(one.sequences, 'sequence')}, {one.kind}"
        table.add_row(name, middle(one.seconds, lambda seconds: f"{seconds * 1e6:,.0f}"), "µs")
    for speed in result.allocator:
        table.add_row(speed.name, rate(speed.operations_per_second), "per second")
    print_table(console, table)


def _print_waste(console: Console, result: CacheBenchmark) -> None:
    table = _new_table("memory", "block", "reserved", "empty", "empty")
    for one in result.waste:
        empty = one.bytes_reserved - one.bytes_filled
        table.add_row(one.kind, str(one.block_size), size(one.bytes_reserved), size(empty), share(one.wasted))
    print_table(console, table)
    _say(console, "64 sequences of up to 2,048 tokens, many short and a few long, mean 300.")


def _print_hits(console: Console, result: CacheBenchmark) -> None:
    table = _new_table("prefix", "block", "prompt tokens", "found", "hit rate")
    for one in result.hit_rates:
        row = (str(one.block_size), count(one.prompt_tokens), count(one.tokens_found), share(one.share))
        table.add_row("32 requests", *row)
    print_table(console, table)
    _say(console, "Each has the same 200 tokens in front of 30 of its own, and comes when the one before has gone.")


def _new_table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: Middle) -> str:
    return middle(Middle(seconds.median * 1e3, seconds.low * 1e3, seconds.high * 1e3, seconds.count), _fine)


def _fine(value: float) -> str:
    """Two decimals where one says too little to see a difference."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _ratio(value: Middle) -> str:
    show = (lambda ratio: f"{ratio:.3f}") if value.median < 2 else ratio_text
    return f"{middle(value, show)} x"


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(line, QUIET))
