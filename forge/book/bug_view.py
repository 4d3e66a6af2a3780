"""A bug's runs on a screen: the rule, the mistake, what caught it, and what a user would have read otherwise."""

from collections.abc import Iterator
from itertools import takewhile
from operator import eq
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.book.bug_runs import BugRuns
from forge.views.formatting import count, plural
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line

_NAMES = ("as it is", "with the bug", "unchecked")
_LEAD = 24
"""Characters shown of what two texts have in common before they part."""


def bug_object(runs: BugRuns) -> dict[str, Any]:
    """Return the runs as facts."""
    bug, index = runs.bug, next(iter(runs.different), None)
    return {
        "bug": bug.name,
        "chapter": bug.chapter,
        "rule": bug.rule,
        "mistake": bug.mistake,
        "known": bug.known,
        "caught_by": runs.caught_by,
        "message": runs.checked.failure,
        "step": runs.checked.steps if runs.checked.failure is not None else None,
        "steps": runs.sound.steps,
        "sound": runs.sound.failure is None,
        "samples": len(runs.sound.token_ids),
        "different": len(runs.different),
        "unchecked_failure": runs.unchecked.failure,
        "unchecked_steps": runs.unchecked.steps,
        "said": None if index is None else runs.sound.texts[index],
        "said_with_bug": None if index is None else runs.unchecked.texts[index],
    }


def print_bug(console: Console, runs: BugRuns) -> None:
    bug = runs.bug
    console.print(Text.assemble(("What catches it? ", TITLE), (bug.name, QUIET)))
    console.print()
    print_table(console, _labelled(("the rule", bug.rule), ("the bug", bug.mistake), ("known from", bug.known)))
    console.print()
    print_table(console, _labelled(*zip(_NAMES, _findings(runs), strict=True)))
    for index in runs.different[:1]:
        console.print()
        print_table(console, _texts(console.width, runs.sound.texts[index], runs.unchecked.texts[index]))
    console.print()
    console.print(_verdict(runs))


def _labelled(*rows: tuple[str, str | Text]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column()
    for label, text in rows:
        table.add_row(label, text)
    return table


def _findings(runs: BugRuns) -> Iterator[Text]:
    sound, checked, unchecked = runs.sound, runs.checked, runs.unchecked
    tokens = sum(map(len, sound.token_ids))
    if sound.failure is None:
        yield Text.assemble(
            ("✓ ", GOOD), f"{plural(sound.steps, 'step')}, {count(tokens)} tokens, every invariant held"
        )
    else:
        yield Text.assemble(("✗ ", TROUBLE), f"step {sound.steps}: {one_line(sound.failure)}")
    if checked.failure is None:
        yield Text(f"{plural(checked.steps, 'step')}, and every invariant held")
    else:
        yield Text.assemble(("✗ ", TROUBLE), f"step {checked.steps}: {one_line(checked.failure)}")
    symptom = f"{len(runs.different)} of {plural(len(sound.token_ids), 'sample')} said something else"
    if unchecked.failure is not None:
        symptom = f"step {unchecked.steps}: {one_line(unchecked.failure)}; until then {symptom}"
    yield Text.assemble(("✗ ", TROUBLE), symptom) if unchecked.failure or runs.different else Text("nothing to be seen")


def _texts(width: int, sound: str, unchecked: str) -> Table:
    """Show where two texts part."""
    common = sum(takewhile(bool, map(eq, sound, unchecked)))
    common = sound.rfind(" ", 0, common) + 1  # where a word begins
    start = max(0, common - _LEAD)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text, style in ((_NAMES[0], sound, ACCENT), (_NAMES[2], unchecked, TROUBLE)):
        shown = Text.assemble(
            "…" if start else "", one_line(text[start:common]) + " ", (one_line(text[common:]), style)
        )
        if not text[common:]:
            shown.append("(nothing more)", QUIET)
        shown.truncate(max(10, width - 14), overflow="ellipsis")
        table.add_row(name, shown)
    return table


def _verdict(runs: BugRuns) -> Text:
    if runs.caught_by == "invariant":
        return Text.assemble(("✓ caught", GOOD), f" by an invariant, in step {runs.checked.steps}")
    if runs.caught_by == "tokens":
        return Text.assemble(("✓ caught", GOOD), " by comparing what was said: no invariant sees it")
    return Text.assemble(("✗ unnoticed", TROUBLE))
