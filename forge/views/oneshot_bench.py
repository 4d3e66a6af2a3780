"""The screens of `forge bench oneshot` and `forge bench prefix-planning`."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.oneshot import Capacity, Level, OneShotBenchmark, Packing
from forge.bench.planning import PlanningBenchmark
from forge.views.bench import middle, ratio_text, seconds_text
from forge.views.figures import count, ms, plural, rate
from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line


def print_oneshot_benchmark(console: Console, result: OneShotBenchmark) -> None:
    console.print(Text("What does a generation's life cost a request that wants one token?", TITLE))
    on = f" on {one_line(result.machine)}" if result.machine else ""
    turns = plural(result.repetitions, "turn")
    console.print(Text(f"{one_line(result.model)}, {one_line(result.device)}{on}; kv {result.kv}, {turns}", QUIET))
    levels = [*result.levels, *([result.control] if result.control else [])]
    if levels:
        console.print()
        _print_levels(console, levels)
    if result.capacity:
        console.print()
        _print_capacity(console, result.capacity)
    if result.packing:
        console.print()
        _print_packing(console, result.packing)
    console.print()
    console.print(_verdict(result.identical, "both lives gave every request the same tokens"))


def print_planning_benchmark(console: Console, result: PlanningBenchmark) -> None:
    console.print(Text("What does it save when requests wait for what one of them computes?", TITLE))
    on = f" on {one_line(result.machine)}" if result.machine else ""
    turns = plural(result.repetitions, "turn")
    console.print(Text(f"{one_line(result.model)}, {one_line(result.device)}{on}; kv prefix, {turns}", QUIET))
    console.print()
    table = _new_table("rubric", "off, s", "on, s", "faster", "tokens off", "on")
    for one in result.shared:
        table.add_row(
            plural(one.rubric_tokens, "token"),
            middle(one.off, seconds_text, spread=False),
            middle(one.on, seconds_text, spread=False),
            f"{middle(one.ratio, ratio_text)} x",
            count(one.tokens_off),
            count(one.tokens_on),
        )
    print_table(console, table)
    if result.shared:
        one = result.shared[0]
        asked = f"{plural(one.requests, 'request')} at once, each with {plural(one.item_tokens, 'token')} of its own"
        console.print(Text(f"{asked}; nothing is cached before. Medians (least–most).", QUIET))
    console.print(_verdict(all(one.identical for one in result.shared), "the same tokens with and without"))


def _print_levels(console: Console, levels: list[Level]) -> None:
    table = _new_table("requests/s", "out", "decode", "oneshot", "ratio", "p95, ms")
    for one in levels:
        table.add_row(
            f"{one.concurrency} at once",
            str(one.output_tokens),
            middle(one.decode, rate, spread=False),
            middle(one.oneshot, rate, spread=False),
            f"{middle(one.ratio, ratio_text)} x",
            f"{ms(one.decode_p95_ms)}, {ms(one.oneshot_p95_ms)}",
        )
    print_table(console, table)
    tokens = plural(levels[0].prompt_tokens, "prompt token")
    console.print(Text(f"{tokens} each. Medians (least–most); p95 of the latency, decode, oneshot.", QUIET))


def _print_capacity(console: Console, one: Capacity) -> None:
    table = _new_table("beside generations", "decode", "oneshot", "")
    ratio = f"{ratio_text(one.latency_ratio)} x"
    table.add_row("judges, p95 latency, ms", ms(one.decode_p95_ms), ms(one.oneshot_p95_ms), ratio)
    speeds = one.decode_tokens_per_second, one.oneshot_tokens_per_second
    table.add_row("generations, tokens/s", *map(rate, speeds), f"{ratio_text(speeds[1] / speeds[0])} x")
    print_table(console, table)
    pool, judges = plural(one.blocks, "block"), plural(one.judges, "judge")
    console.print(Text(f"{one.generations} generations of which the pool ({pool}) holds three; {judges}.", QUIET))


def _print_packing(console: Console, one: Packing) -> None:
    table = _new_table("prefill, tokens/s", "one prompt", f"prompts of {one.short_tokens}", "ratio")
    cells = middle(one.one, rate, spread=False), middle(one.many, rate, spread=False)
    table.add_row(plural(one.tokens, "token"), *cells, f"{middle(one.ratio, ratio_text)} x")
    print_table(console, table)


def _verdict(same: bool, what: str) -> Text:
    return Text(f"✓ {what}", GOOD) if same else Text(f"✗ not {what}", TROUBLE)


def _new_table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
