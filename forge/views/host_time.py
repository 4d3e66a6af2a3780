"""`forge bench host` on the screen: what a step costs beside its forward pass, by how many sequences it has."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.host_time import HostTime
from forge.views.palette import QUIET, TITLE
from forge.views.terminal import print_table

_COLUMNS = ("sequences", "median", "least", "9 of 10 below", "plan and batch", "choose", "commit and record", "bar")


def host_time_object(times: Sequence[HostTime]) -> list[dict[str, Any]]:
    """In microseconds."""
    return [asdict(one) | {"record": one.record, "bar": one.bar} for one in times]


def print_host_time(console: Console, times: Sequence[HostTime], machine: str | None = None) -> None:
    console.print(Text("What does a step cost beside its forward pass?", TITLE))
    where = f" on {machine}" if machine else ""
    console.print(Text(f"decode steps of the hash model{where}, {times[0].steps} of each; microseconds\n", QUIET))
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for one in times:
        figures = (one.median, one.least, one.ninth_decile, one.schedule, one.sample, one.record, one.bar)
        table.add_row(str(one.sequences), *(f"{figure:,.0f}" for figure in figures))
    print_table(console, table)
