"""The exercises on a screen: the list, a check's result, a hint, the engine's own source, a run beside forge's own."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.book.drawing import draw_source
from forge.book.source_code import excerpt
from forge.exercises.catalog import Entry
from forge.exercises.loading import source_of
from forge.exercises.session import Result
from forge.trace.records import SpecCycle
from forge.views.block_map import SequenceNames, pool_lines, table_lines
from forge.views.formatting import rate
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.scheduler import step_line
from forge.views.speculation import marked_text, steps_of
from forge.views.terminal import new_table, print_hanging, print_table
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.exercises.running import Comparison, Measured


_SIGNS = {"right": ("✓", GOOD), "wrong": ("✗", TROUBLE), "not written": ("·", QUIET), "not checked": (" ", QUIET)}


def print_list(
    console: Console,
    entries: Sequence[Entry],
    passed: set[int],
    started: set[int],
    go_on: Entry | None,
    folder: str,
) -> None:
    console.print(Text("Which exercises are done, and which comes next?", TITLE))
    console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, style=QUIET)
    for entry in entries:
        done, begun = entry.number in passed, entry.number in started
        sign = Text("✓", GOOD) if done else Text("→", ACCENT) if entry is go_on else Text("·" if begun else " ", QUIET)
        table.add_row(sign, Text(f"{entry.number:>2}"), entry.title, Text(entry.chapter, QUIET), f"{entry.hours} h")
    print_table(console, table)
    console.print()
    if started:
        console.print(Text(f"in {folder}", QUIET))
    if go_on is None:
        console.print(Text("All are done. forge build engine generate runs all of them at once.", QUIET))
    else:
        command = "check" if go_on.number in started else "start"
        console.print(Text.assemble(("next  ", QUIET), (f"forge build {command} {go_on.number}", ACCENT)))


def print_started(console: Console, entry: Entry, path: str, kept: str | None = None) -> None:
    console.print(Text.assemble(("wrote ", QUIET), path))
    if kept is not None:
        console.print(Text.assemble(("your file is now ", QUIET), kept))
    console.print(Text(f"Read first: forge {entry.chapter}. Then: forge build check {entry.number}", QUIET))


def print_result(console: Console, entry: Entry, result: Result, height: int | None = None) -> None:
    """Print a check's result. height: at most so many lines; calls and pictures are cut to fit, the rule never."""
    with console.capture() as captured:
        _print_result(console, entry, result)
    lines = captured.get().splitlines()
    if height is not None and len(lines) > height:
        lines = [*lines[: height - 1], f"… {len(lines) - height + 1} lines more: forge build check {entry.number}"]
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)


def _print_result(console: Console, entry: Entry, result: Result) -> None:
    console.print(Text.assemble((f"{entry.number} · {entry.title}", TITLE)))
    if result.changed:
        words = (
            f"The exercise has changed since you began it: forge build reset {entry.number} writes the new template."
        )
        print_hanging(console, Text(words, ACCENT), 0)
    if result.passed:
        console.print(Text.assemble(("✓ ", GOOD), "it keeps all its promises"))
        console.print(Text(f"forge build run {entry.number}        runs the engine on it", QUIET))
        console.print(Text(f"forge build solution {entry.number}   shows the engine's own, and what each costs", QUIET))
        print_hanging(console, Text.assemble(("? ", ACCENT), entry.exercise().next_question), 2)
        return
    console.print()
    print_hanging(console, Text.assemble(("✗ ", TROUBLE), result.sentence), 2)
    print_hanging(console, Text.assemble("  ", result.found), 2)
    if result.line:
        print_hanging(console, Text.assemble("  ", (result.line, ACCENT)), 4)
    print_hanging(console, Text.assemble(("? ", ACCENT), result.question), 2)
    if "not written" in result.functions.values():
        console.print()
        for name, state in result.functions.items():
            sign, style = _SIGNS[state]
            console.print(Text.assemble(f"  {name:<30}", (f"{sign} {state}", style)))
    for heading, text in (("", "\n".join(result.calls)), ("before", result.before), ("after", result.after)):
        if text and not (heading == "before" and not result.after):
            _print_block(console, heading, text)
    if result.printed:
        _print_block(console, "your code printed", result.printed)
    console.print()
    console.print(Text(f"forge build hint {entry.number}", QUIET))


def _print_block(console: Console, heading: str, text: str) -> None:
    console.print()
    if heading:
        console.print(Text(heading, QUIET))
    for line in text.splitlines():
        console.print(Text(f"    {line}", "" if heading else ACCENT, no_wrap=len(line) + 4 <= console.width))


def print_hints(console: Console, entry: Entry, hints: Sequence[str], numbers: Iterable[int]) -> None:
    """Print these hints, counted from 1."""
    for number in numbers:
        heading = f"  hint {number} of {len(hints)}"
        console.print(Text.assemble((f"{entry.number} · {entry.title}", TITLE), (heading, QUIET)))
        print_hanging(console, Text(hints[number - 1]), 0)
    if number == len(hints):
        console.print(Text(f"There is no further one: forge build solution {entry.number}", QUIET))


def print_solution(console: Console, entry: Entry, path: Path | None, costs: "Sequence[Measured] | None") -> None:
    """Print the engine's own source. path: the reader's file, if it has passed; its functions come first, then the
    engine's own, why it differs, and what each costs."""
    exercise = entry.exercise()
    if path is not None:
        console.print(Text("yours", TITLE))
        for line in source_of(path, exercise.functions).splitlines():
            console.print(Text(line), soft_wrap=True)
        console.print()
        console.print(Text("forge's own", TITLE))
    for dotted in exercise.solution:
        draw_source(console, excerpt(dotted))
    print_hanging(console, Text(exercise.differs), 0)
    if path is None:
        return
    console.print()
    if costs is None:
        console.print(Text("What each costs could not be measured: your code did not end the benchmark.", TROUBLE))
    else:
        _print_costs(console, costs)
    console.print()
    print_hanging(console, Text.assemble(("? ", ACCENT), exercise.next_question), 2)


def _print_costs(console: Console, costs: "Sequence[Measured]") -> None:
    table = new_table("in turns, medians", "yours", "forge's own", last="")
    for cost in costs:
        yours, reference = median(cost.yours), median(cost.reference)
        words = "the difference is noise" if cost.is_noise else f"{cost.ratio:.2f} times as long"
        table.add_row(cost.size, _microseconds(yours), _microseconds(reference), words)
    print_table(console, table)


def _microseconds(value: float) -> str:
    return f"{value:,.1f} µs" if value < 1000 else f"{value / 1000:,.2f} ms"


def screen_lines(screen: str) -> Text:
    """Return what another process has drawn, with its colours."""
    return Text.from_ansi(screen)


def print_comparison(console: Console, entry: Entry, comparison: "Comparison") -> None:
    yours, reference = comparison.yours, comparison.reference
    console.print(Text.assemble((f"{entry.number} · {entry.title}", TITLE), ("  the engine on your code", QUIET)))
    console.print()
    for line in _view(comparison, console.width):
        console.print(line)
    console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column(justify="right")
    table.add_column(justify="right", style=QUIET)
    table.add_row("", "yours", "forge's own")
    table.add_row("tokens", f"{yours.num_tokens}", f"{reference.num_tokens}")
    table.add_row("steps", f"{len(yours.records)}", f"{len(reference.records)}")
    table.add_row("tokens per second", rate(yours.tokens_per_second), rate(reference.tokens_per_second))
    print_table(console, table)
    console.print()
    called = ", ".join(f"{name.rpartition('.')[2]} {times}" for name, times in comparison.calls.items())
    print_hanging(console, Text(f"calls of your functions: {called}", QUIET), 2)
    if comparison.identical:
        console.print(Text.assemble(("✓ ", GOOD), f"identical: {yours.num_tokens} tokens"))
        return
    pairs = zip(yours.token_ids, reference.token_ids, strict=True)
    number, index = next((place, _first_difference(*pair)) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    console.print(Text.assemble(("✗ ", TROUBLE), f"sample {number} differs from its token {index} on"))


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    same = (index for index, (our_id, their_id) in enumerate(zip(ours, theirs, strict=False)) if our_id != their_id)
    return next(same, min(len(ours), len(theirs)))


def _view(comparison: "Comparison", width: int) -> Iterator[Text]:
    """Draw the run as its chapter does."""
    yours = comparison.yours
    for text in yours.texts[:4]:
        shown = Text(one_line(text), no_wrap=True)
        shown.truncate(width, overflow="ellipsis")
        yield shown
    if comparison.exercise.view == "blocks" and (block_map := yours.fullest.blocks) is not None:
        names = SequenceNames()
        yield Text("")
        yield Text(f"step {yours.fullest.step}, the fullest", QUIET)
        yield from (*pool_lines(block_map, names, width, 4), *table_lines(block_map, names, width, 8))
    elif comparison.exercise.view == "scheduler":
        telling = [record for record in yours.records if record.admitted or record.preempted or record.finished]
        yield Text("")
        for record in telling[:6]:
            line = Text(step_line(record), no_wrap=True)
            line.truncate(width, overflow="ellipsis")
            yield line
    elif comparison.exercise.view == "speculation":
        yield Text("")
        yield marked_text(steps_of(yours.records), yours.token_text)
        cycles = [cycle for record in yours.records for cycle in record.cycles if cycle.proposed]
        proposed, accepted = (sum(map(count, cycles)) for count in (lambda cycle: len(cycle.proposed), _accepted))
        if proposed:
            yield Text(f"accepted {accepted} of {proposed} draft tokens", QUIET)


def _accepted(cycle: SpecCycle) -> int:
    return cycle.num_accepted
