"""The screens of `forge bench`: who is how fast on this file, how near the machine's limit that is, and what accuracy
the cheaper ways of computing cost.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forge.bench.quality import QualityBenchmark
from forge.bench.results import FORGE, CpuBenchmark, Figure, Limits, Middle
from forge.views.figures import NOTHING, count, percent, plural, rate, size
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE
from forge.views.terminal import can_redraw, print_table
from forge.views.text import one_line

BUSY = 0.3
"""Of a CPU: load from elsewhere that makes figures worth less."""
_STAR = "*"
"""Marks what is held against another file's reference."""
DRIFT = 0.1
"""Between the machine's limits before and after that is worth a word."""


class BenchProgress:
    """One line on a terminal that says what is being done, gone when it is; nothing in a pipe."""

    def __init__(self, console: Console):
        # Drawn when something new begins and never in between: that would take time from who is measured.
        self._live = Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) else None

    def __enter__(self) -> "BenchProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, text: str) -> None:
        if self._live:
            self._live.update(Text(one_line(text), QUIET, no_wrap=True, overflow="ellipsis"), refresh=True)


def print_cpu_benchmark(console: Console, result: CpuBenchmark) -> None:
    """Who ran on what; speed; how near the machine's limits each figure is; loading and memory; what was left out."""
    console.print(Text(_question(result), TITLE))
    for heading in _headings(result):
        console.print(Text(heading, QUIET))
    if result.figures:
        for table in _speed_tables(console, result):
            console.print()
            print_table(console, table)
        for sentence in _speed_sentences(result):
            console.print(sentence)
        _print_roofline(console, result)
    if result.standings:
        console.print()
        print_table(console, _standing_table(result))
        for line in _memory_sentences(result):
            console.print(Text(line, QUIET))
    notes = _notes(result)
    if notes:
        console.print()
    for note in notes:
        console.print(note)


def print_quality(console: Console, result: QualityBenchmark) -> None:
    """Perplexity by variant, and how far each is from float32."""
    console.print(Text("What do quantization and rounding cost in accuracy?", TITLE))
    text = f"{one_line(result.text)}: {plural(result.tokens, 'token')} predicted"
    console.print(Text(f"{text} in {plural(result.windows, 'window')} of {count(result.window)}", QUIET))
    console.print()
    for table in _quality_tables(result):
        print_table(console, table)
        console.print()
    first = result.qualities[0].variant.model
    if any(len(quality.against) > 1 for quality in result.qualities):
        console.print(Text(f"* held against {_short_name(first)} in float32, not against the file itself.", QUIET))
    console.print(
        Text(
            "KL: divergence from the float32 reference's distribution, in thousandths of a nat per token; worst: the "
            "largest of any token; top 1: how often both hold the same token for the likeliest. The reference "
            "multiplies dequantized weights in float32; cpu rounds activations to int8 too.",
            QUIET,
        )
    )


def middle(value: Middle | None, show: Callable[[float], str], spread: bool = True) -> str:
    """`44.1 (43.8–44.6)`: the median, and the least and the most."""
    if value is None:
        return NOTHING
    return f"{show(value.median)} ({show(value.low)}–{show(value.high)})" if spread else show(value.median)


def ratio_text(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def seconds_text(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f}"


def _question(result: CpuBenchmark) -> str:
    beside = f" beside {' and '.join(result.peers)}" if result.peers else ""
    return f"How fast is this model here{beside}?"


def _headings(result: CpuBenchmark) -> list[str]:
    on = f" on {one_line(result.machine)}" if result.machine else ""
    model = f"{one_line(result.model)} ({size(result.size.file_bytes)})"
    turns = f"{plural(result.repetitions, 'repetition')}, taking turns"
    lines = [f"{model}, {plural(result.threads, 'thread')}{on}; {turns}"]
    return lines + [one_line(standing.description) for standing in result.standings]


def _new_table() -> Table:
    return Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)


def _speed_tables(console: Console, result: CpuBenchmark) -> list[Table]:
    """One table for all peers where it fits, otherwise one for each, with fewer spreads if it must be."""
    apart = [[peer] for peer in result.peers] or [[]]
    for groups, spreads in (([result.peers], 2), (apart, 2), (apart, 1), (apart, 0)):
        tables = [_speed_table(result, peers, spreads) for peers in groups]
        if all(_fits(console, table) for table in tables):
            break
    return tables


def _fits(console: Console, table: Table) -> bool:
    return console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width


def _speed_table(result: CpuBenchmark, peers: Sequence[str], spreads: int) -> Table:
    """spreads: how many columns show the least and the most: 2, forge and the ratios; 1, forge; 0, none."""
    table = _new_table()
    table.add_column("tokens/s", no_wrap=True)
    table.add_column(FORGE, justify="right", style=ACCENT, no_wrap=True)
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
    if result.limits:
        table.add_column("of the limit", justify="right", no_wrap=True)
    for figure in result.figures:
        cells = [figure.case.title, middle(figure.rate(FORGE), rate, spread=spreads > 0)]
        for peer in peers:
            cells += [middle(figure.rate(peer), rate, spread=False), _ratio(figure, peer, spreads > 1)]
        if result.limits:
            cells.append(_share(figure, result.limits))
        table.add_row(*cells)
    return table


def _ratio(figure: Figure, peer: str, spread: bool) -> str:
    value = figure.ratio(peer)
    if value is None:
        return NOTHING
    if not spread:
        return f"{ratio_text(value.median)} x"
    return f"{ratio_text(value.median)} x ({ratio_text(value.low)}–{ratio_text(value.high)})"


def _share(figure: Figure, limits: Limits) -> str:
    line = figure.roofline(FORGE, limits)
    return NOTHING if line is None else f"{percent(line.share)} {line.bound}"


def _speed_sentences(result: CpuBenchmark) -> list[Text]:
    lines = []
    if result.peers:
        lines.append(
            "Medians (least–most). A ratio is forge over the peer, taken repetition by repetition; "
            "above 1 forge is faster."
        )
    contexts = {figure.case.context for figure in result.figures if figure.case.kind == "decode"}
    if contexts:
        lengths = " or ".join(f"{context:,}" for context in sorted(contexts))
        lines.append(f"decode N: N sequences with {lengths} tokens each in the cache take one step together.")
    return [Text(line, QUIET) for line in lines]


def _print_roofline(console: Console, result: CpuBenchmark) -> None:
    limits = result.limits
    if limits is None:
        return
    console.print()
    memory, products = gigabytes(limits.bytes_per_second), f"{limits.products_per_second / 1e9:,.0f}"
    words = f"{memory} GB/s from memory; {products} G int8 products/s, forge's tile with its weights in cache"
    console.print(Text.assemble(("The machine's limits: ", TITLE), words))
    table = _new_table()
    table.add_column("roofline", no_wrap=True)
    for heading in ("reads", "GB/s", "products", "G/s", "at best", "took", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in result.figures:
        line, one = figure.roofline(FORGE, limits), figure.of(FORGE)
        if line is None or one is None:
            continue
        table.add_row(
            figure.case.title,
            size(figure.needs.bytes_read),
            gigabytes(line.bytes_per_second),
            _billions(figure.needs.products),
            f"{line.products_per_second / 1e9:,.0f}",
            _milliseconds(line.limit_seconds),
            _milliseconds(Middle.of(one.seconds).median),
            percent(line.share),
        )
    print_table(console, table)
    lines = [line for figure in result.figures if (line := figure.roofline(FORGE, limits))]
    in_cache = any(line.bound == "memory" and line.share > 1 for line in lines)
    sentence = (
        "reads: the file's weights once and the keys and values before the step, the least that a step can do with. "
        "products: multiplications as int8; a float32 one counts as four. at best: what the nearer limit allows."
    )
    if in_cache:
        sentence += " More than 100 % of memory's limit: these weights stay in the processor's cache between steps."
    console.print(Text(sentence, QUIET))


def _billions(value: int) -> str:
    return f"{value / 1e9:,.1f} G" if value >= 1e9 else f"{value / 1e6:,.1f} M"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _standing_table(result: CpuBenchmark) -> Table:
    table = _new_table()
    table.add_column("loading and memory", no_wrap=True)
    for heading in ("load, s", "loaded", "peak", "peak / file"):
        table.add_column(heading, justify="right", no_wrap=True)
    for standing in result.standings:
        table.add_row(
            Text(standing.name, ACCENT if standing.name == FORGE else ""),
            middle(standing.load, seconds_text),
            size(standing.loaded_bytes),
            size(standing.peak_bytes),
            f"{standing.peak_bytes / result.size.file_bytes:,.2f} x",
        )
    return table


def _memory_sentences(result: CpuBenchmark) -> list[str]:
    lines = [
        "load: from opening the file, which is in the system's cache, to ready. loaded, peak: the most memory that the "
        "process had had by then, and in all; interpreter, libraries and mapped pages included."
    ]
    for standing in result.standings:
        if standing.weight_bytes:
            share = standing.weight_bytes / result.size.weight_bytes
            lines.append(f"{standing.name} keeps the weights in {size(standing.weight_bytes)}, {share:.2f} x the file.")
    return lines


def _notes(result: CpuBenchmark) -> list[Text]:
    notes = [Text(f"· {one_line(skipped.name)}: {one_line(skipped.reason)}", QUIET) for skipped in result.skipped]
    for figure in result.figures:
        for one in figure.measured:
            turns = len(one.seconds)
            if turns < result.repetitions and not result.interrupted:
                words = f"· {figure.case.title}: {one.contender} took {turns} of {result.repetitions} turns"
                notes.append(Text(f"{words}; its are too long for more", QUIET))
        for peer in result.peers:
            different = figure.disagreements(peer)
            if different:
                whole = plural(figure.case.sequences, "sequence")
                notes.append(
                    Text(f"· {figure.case.title}: {peer} sees another likeliest token in {different} of {whole}", QUIET)
                )
    before, after = result.before, result.after
    if before and after:
        drift = after.bytes_per_second / before.bytes_per_second
        if abs(drift - 1) > DRIFT:
            rates = [gigabytes(limits.bytes_per_second) for limits in (before, after)]
            text = f"· the machine did not stay the same: {rates[0]} GB/s from memory before the run, {rates[1]} after"
            notes.append(Text(text, TROUBLE))
    if result.load_average is not None and result.load_average > BUSY:
        notes.append(
            Text(
                f"· the machine was busy with something else (load average {result.load_average:.1f} before the run): "
                "expect other figures when it is idle",
                TROUBLE,
            )
        )
    if result.interrupted:
        notes.append(Text("· interrupted: this is what there was until then", TROUBLE))
    return notes


def _short_name(model: str) -> str:
    """Of a path, the file's name without its ending."""
    return one_line(Path(model).name.removesuffix(".gguf"))


def _quality_tables(result: QualityBenchmark) -> list[Table]:
    """One per model."""
    tables = []
    for model, group in groupby(result.qualities, key=lambda quality: quality.variant.model):
        qualities = list(group)
        references = [one.reference for one in qualities[0].against]
        table = _new_table()
        table.add_column(_short_name(model), overflow="fold")
        table.add_column("KV", no_wrap=True)
        table.add_column("perplexity", justify="right", no_wrap=True)
        for number, _ in enumerate(references):
            table.add_column(f"KL{_STAR * number}", justify="right", no_wrap=True)
            if number == 0:
                table.add_column("worst", justify="right", no_wrap=True)
            table.add_column(f"top 1{_STAR * number}", justify="right", no_wrap=True)
        for quality in qualities:
            variant = quality.variant
            cells = [variant.device, variant.kv_dtype, f"{quality.perplexity:,.4f}"]
            for number, one in enumerate(quality.against):
                worst = [f"{one.kl_max * 1e3:,.0f}"] if number == 0 else []
                cells += [f"{one.kl * 1e3:,.3f}", *worst, f"{one.top1_agreement * 100:.2f} %"]
            table.add_row(*cells, style=QUIET if variant.is_reference else "")
        tables.append(table)
    return tables
