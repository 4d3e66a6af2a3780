"""The findings of `forge doctor`, one line each: ok, a note, or trouble with what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line

Level = Literal["ok", "note", "trouble"]
_SIGNS = {"ok": ("✓", GOOD), "note": ("·", QUIET), "trouble": ("✗", TROUBLE)}
_NARROW = 32
"""Columns of a terminal that leaves no room for a table."""


@dataclass(frozen=True)
class Finding:
    """One check of this machine and its result."""

    name: str
    level: Level
    text: str


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "trouble" for finding in findings)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    console.print(Text("Can this machine run forge, and with what?", TITLE))
    console.print()
    is_narrow = console.width < _NARROW
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=1)
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        shown = Text(one_line(finding.text), TROUBLE if finding.level == "trouble" else "")
        if is_narrow:
            console.print(Text.assemble((sign, style), " ", (one_line(finding.name), QUIET), " ", shown))
        else:
            table.add_row(Text(sign, style), one_line(finding.name), shown)
    if not is_narrow:
        print_table(console, table)
    console.print()
    console.print(Text(_verdict(findings)))


def _verdict(findings: Sequence[Finding]) -> str:
    trouble = sum(finding.level == "trouble" for finding in findings)
    if trouble:
        return f"{trouble} of {len(findings)} need mending, marked ✗."
    return 'Nothing needs mending. Try: forge generate --kv basic "Once upon a time" 32'
