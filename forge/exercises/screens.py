"""The exercises on a screen: the list, a check's result, a hint, the engine's own source, a run beside forge's own."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.book.drawing import draw_source
from forge.book.source_code import excerpt
from forge.exercises.catalog import Entry
from forge.exercises.result import Result
from forge.trace.records import SpecCycle
from forge.views.block_map import SequenceNames, pool_lines, table_lines
from forge.views.formatting import rate
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.scheduler import step_line
from forge.views.speculation import marked_text, steps_of
from forge.views.terminal import print_hanging, print_table
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.exercises.exercise import Exercise
    from forge.exercises.running import Comparison


def print_list(
    console: Console, entries: Sequence[Entry], passed: set[int], started: set[int], go_on: Entry | None
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
    if go_on is None:
        console.print(Text("All are done. forge build run NUMBER runs the engine on one of yours.", QUIET))
    else:
        command = "check" if go_on.number in started else "start"
        console.print(Text.assemble(("next  ", QUIET), (f"forge build {command} {go_on.number}", ACCENT)))


def print_started(console: Console, entry: Entry, path: str) -> None:
    console.print(Text.assemble(("wrote ", QUIET), path))
    console.print(Text(f"Read first: forge {entry.chapter}. Then: forge build check {entry.number}", QUIET))


def print_result(console: Console, entry: Entry, result: Result) -> None:
    console.print(Text.assemble((f"{entry.number} · {entry.title}", TITLE)))
    if result.passed:
        console.print(Text.assemble(("✓ ", GOOD), "it keeps all its promises"))
        console.print(Text(f"forge build run {entry.number} runs the engine on it", QUIET))
        return
    console.print()
    print_hanging(console, Text.assemble(("✗ ", TROUBLE), result.sentence), 2)
    print_hanging(console, Text.assemble("  ", result.found), 2)
    if result.line:
        print_hanging(console, Text.assemble("  ", (result.line, ACCENT)), 4)
    for heading, text in (("", "\n".join(result.calls)), ("before", result.before), ("after", result.after)):
        if text and not (heading == "before" and not result.after):
            _print_block(console, heading, text)
    if result.printed:
        _print_block(console, "your code printed", result.printed)
    console.print()
    print_hanging(console, Text.assemble(("? ", ACCENT), result.question), 2)
    console.print(Text(f"forge build hint {entry.number}", QUIET))


def _print_block(console: Console, heading: str, text: str) -> None:
    console.print()
    if heading:
        console.print(Text(heading, QUIET))
    for line in text.splitlines():
        console.print(Text(f"    {line}", "" if heading else ACCENT, no_wrap=len(line) + 4 <= console.width))


def print_hint(console: Console, entry: Entry, hints: Sequence[str], number: int) -> None:
    """One hint of those that there are, counted from 1."""
    console.print(
        Text.assemble((f"{entry.number} · {entry.title}", TITLE), (f"  hint {number} of {len(hints)}", QUIET))
    )
    print_hanging(console, Text(hints[number - 1]), 0)
    if number == len(hints):
        console.print(Text(f"There is no further one: forge build solution {entry.number}", QUIET))


def print_solution(console: Console, exercise: "Exercise") -> None:
    """The engine's own source."""
    for dotted in exercise.solution:
        draw_source(console, excerpt(dotted))


def print_comparison(console: Console, entry: Entry, comparison: "Comparison") -> None:
    yours, own = comparison.yours, comparison.own
    console.print(Text.assemble((f"{entry.number} · {entry.title}", TITLE), ("  the engine on your code", QUIET)))
    console.print()
    for line in _view(comparison, console.width):
        console.print(line)
    console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column(justify="right")
    table.add_column(justify="right", style=QUIET)
    table.add_row("", "yours", comparison.exercise.beside)
    table.add_row("tokens", f"{yours.num_tokens}", f"{own.num_tokens}")
    table.add_row("steps", f"{len(yours.records)}", f"{len(own.records)}")
    table.add_row("tokens per second", rate(yours.tokens_per_second), rate(own.tokens_per_second))
    print_table(console, table)
    console.print()
    if comparison.identical:
        console.print(Text.assemble(("✓ ", GOOD), f"identical: {yours.num_tokens} tokens"))
        return
    pairs = zip(yours.token_ids, own.token_ids, strict=True)
    number, index = next((place, _first_difference(*pair)) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    console.print(Text.assemble(("✗ ", TROUBLE), f"sample {number} differs from its token {index} on"))


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    same = (index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    return next(same, min(len(ours), len(theirs)))


def _view(comparison: "Comparison", width: int) -> Iterator[Text]:
    """What the chapter shows of a run."""
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
        proposed, accepted = (sum(map(count, cycles)) for count in (lambda one: len(one.proposed), _accepted))
        if proposed:
            yield Text(f"accepted {accepted} of {proposed} draft tokens", QUIET)


def _accepted(cycle: SpecCycle) -> int:
    return cycle.num_accepted
