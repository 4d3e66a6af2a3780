"""The exercises on a screen: the list, a check's result, a hint, the engine's own source, a run beside forge's own."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from forge.book.drawing import draw_source
from forge.book.source_code import excerpt
from forge.exercises.catalog import Entry
from forge.exercises.loading import source_of
from forge.exercises.session import Comparison, Measured, Result
from forge.views.block_map import SequenceNames, pool_lines, table_lines
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.scheduler import step_line
from forge.views.screen import Hanging, Part, Table, draw, marked, question, sides, title, trouble, unbroken
from forge.views.speculation import marked_text, steps_of
from forge.views.terminal import cut
from forge.views.text import one_line

_SIGNS = {"right": ("✓", GOOD), "wrong": ("✗", TROUBLE), "not written": ("·", QUIET), "not checked": (" ", QUIET)}


def list_screen(
    entries: Sequence[Entry], passed: set[int], started: set[int], go_on: Entry | None, folder: str
) -> Iterator[Part]:
    yield from question("Which exercises are done, and which comes next?")
    rows = []
    for entry in entries:
        done, begun = entry.number in passed, entry.number in started
        sign = Text("✓", GOOD) if done else Text("→", ACCENT) if entry is go_on else Text("·" if begun else " ", QUIET)
        rows.append((sign, f"{entry.number:>2}", entry.title, entry.chapter, f"{entry.hours} h"))
    yield from (Table(("",) * 5, rows, names=5, styles={3: QUIET, 4: QUIET}, wraps=(2,)), None)
    if started:
        yield f"in {folder}"
    if go_on is None:
        yield "All are done. forge build engine generate runs all of them at once."
    else:
        command = "check" if go_on.number in started else "start"
        yield Text.assemble(("next  ", QUIET), (f"forge build {command} {go_on.number}", ACCENT))


def started_screen(entry: Entry, path: Path, kept: Path | None = None) -> Iterator[Part]:
    yield Text.assemble(("wrote ", QUIET), str(path))
    if kept is not None:
        yield Text.assemble(("your file is now ", QUIET), str(kept))
    yield f"Read first: forge {entry.chapter}. Then: forge build check {entry.number}"


def print_result(console: Console, entry: Entry, result: Result, height: int | None = None) -> None:
    """Print a check's result. height: at most so many lines; calls and pictures are cut to fit, the rule never."""
    with console.capture() as captured:
        draw(console, _result_screen(entry, result))
    lines = captured.get().splitlines()
    if height is not None and len(lines) > height:
        lines = [*lines[: height - 1], f"… {len(lines) - height + 1} lines more: forge build check {entry.number}"]
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)


def _result_screen(entry: Entry, result: Result) -> Iterator[Part]:
    yield title(f"{entry.number} · {entry.title}")
    if result.changed:
        words = (
            f"The exercise has changed since you began it: forge build reset {entry.number} writes the new template."
        )
        yield Hanging(Text(words, ACCENT), 0)
    if result.passed:
        yield marked(True, "it keeps all its promises")
        yield f"forge build run {entry.number}        runs the engine on it"
        yield f"forge build solution {entry.number}   shows the engine's own, and what each costs"
        yield _asked(entry.exercise().next_question)
        return
    yield from (None, Hanging(marked(False, result.sentence), 2))
    yield Hanging(Text(f"  {result.found}"), 2)
    if result.line:
        yield Hanging(Text.assemble("  ", (result.line, ACCENT)), 4)
    yield _asked(result.question)
    if "not written" in result.functions.values():
        yield None
        for name, state in result.functions.items():
            sign, style = _SIGNS[state]
            yield Text.assemble(f"  {name:<30}", (f"{sign} {state}", style))
    before = result.before if result.after else ""
    blocks = ("", "\n".join(result.calls)), ("before", before), ("after", result.after)
    for heading, text in (*blocks, ("your code printed", result.printed)):
        if text:
            yield from (None, *([heading] if heading else []))
            yield from (_indented(line, "" if heading else ACCENT) for line in text.splitlines())
    yield from (None, f"forge build hint {entry.number}")


def _asked(text: str) -> Hanging:
    return Hanging(Text.assemble(("? ", ACCENT), text), 2)


def _indented(line: str, style: str) -> Part:
    return lambda width: [Text(f"    {line}", style, no_wrap=len(line) + 4 <= width)]


def hints_screen(entry: Entry, hints: Sequence[str], numbers: Iterable[int]) -> Iterator[Part]:
    """Draw these hints, counted from 1."""
    for number in numbers:
        heading = f"  hint {number} of {len(hints)}"
        yield Text.assemble((f"{entry.number} · {entry.title}", TITLE), (heading, QUIET))
        yield Hanging(Text(hints[number - 1]), 0)
    if number == len(hints):
        yield f"There is no further one: forge build solution {entry.number}"


def print_solution(console: Console, entry: Entry, path: Path | None, costs: Sequence[Measured] | None) -> None:
    """Print the engine's own source. path: the reader's file, if it has passed; its functions come first, then the
    engine's own, why it differs, and what each costs."""
    exercise = entry.exercise()
    if path is not None:
        yours = source_of(path, exercise.functions).splitlines()
        draw(console, (title("yours"), *map(unbroken, yours), None, title("forge's own")))
    for dotted in exercise.solution:
        draw_source(console, excerpt(dotted))
    draw(console, [Hanging(Text(exercise.differs), 0)])
    if path is not None:
        unmeasured = "What each costs could not be measured: your code did not end the benchmark."
        shown = trouble(unmeasured) if costs is None else _costs(costs)
        draw(console, (None, shown, None, _asked(exercise.next_question)))


def _costs(costs: Sequence[Measured]) -> Table:
    shown = {
        "median": lambda rounds: _microseconds(median(rounds)),
        "words": lambda cost: "the difference is noise" if cost.is_noise else f"{cost.ratio:.2f} times as long",
    }
    columns = ("in turns, medians: {size}", "yours: {yours:median}", "forge's own: {reference:median}", ": {:words}")
    return Table.of(costs, *columns, formats=shown, lefts=(3,))


def _microseconds(value: float) -> str:
    return f"{value:,.1f} µs" if value < 1000 else f"{value / 1000:,.2f} ms"


def comparison_screen(entry: Entry, comparison: Comparison) -> Iterator[Part]:
    yours, reference = comparison.yours, comparison.reference
    yield Text.assemble((f"{entry.number} · {entry.title}", TITLE), ("  the engine on your code", QUIET))
    yield from (None, lambda width: _view(comparison, width), None)
    rows = "tokens: {num_tokens}", "steps: {num_steps}", "tokens per second: {tokens_per_second:rate}"
    yield from (sides(("yours", "forge's own"), (yours, reference), *rows), None)
    called = ", ".join(f"{name.rpartition('.')[2]} {times}" for name, times in comparison.calls.items())
    yield Hanging(Text(f"calls of your functions: {called}", QUIET), 2)
    if comparison.identical:
        yield marked(True, f"identical: {yours.num_tokens} tokens")
        return
    pairs = enumerate(zip(yours.token_ids, reference.token_ids, strict=True))
    number, pair = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    yield marked(False, f"sample {number} differs from its token {sum(takewhile(bool, map(eq, *pair)))} on")


def _view(comparison: Comparison, width: int) -> Iterator[Part]:
    """Draw the run as its chapter does."""
    yours = comparison.yours
    yield from (cut(Text(one_line(text)), width) for text in yours.texts[:4])
    if comparison.exercise.view == "blocks" and (block_map := yours.fullest.blocks) is not None:
        names = SequenceNames()
        yield from (None, f"step {yours.fullest.step}, the fullest")
        yield from (*pool_lines(block_map, names, width, 4), *table_lines(block_map, names, width, 8))
    elif comparison.exercise.view == "scheduler":
        telling = [record for record in yours.records if record.admitted or record.preempted or record.finished]
        yield from (None, *(cut(Text(step_line(record)), width) for record in telling[:6]))
    elif comparison.exercise.view == "speculation":
        yield from (None, marked_text(steps_of(yours.records), yours.token_text))
        cycles = [cycle for record in yours.records for cycle in record.cycles if cycle.proposed]
        proposed, accepted = (sum(len(cycle.proposed) for cycle in cycles), sum(cycle.num_accepted for cycle in cycles))
        if proposed:
            yield f"accepted {accepted} of {proposed} draft tokens"
