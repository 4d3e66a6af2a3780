"""Screens made of parts: titles, sentences, tables whose columns are templates, verdicts. `draw` draws them.

    Table.of(facts["waste"], "memory: {kind}", "reserved: {bytes_reserved:size}", "empty: {wasted:share}")

is a table with a row for each item. A column is a heading and a template; a template's fields are keys or attributes of
the item (`{totals.first_token.p50:ms}`), shown as `formatting.formatted` says.

A command returns its facts and such a screen as one `Report` and prints nothing itself. Its caller decides what becomes
of it: the command line draws it or writes its facts as JSON, a chapter does the one and reads the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from rich.console import Console, OverflowMethod
from rich.table import Table as RichTable
from rich.text import Text

from forge.views.formatting import formatted
from forge.views.json_output import to_json
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.terminal import new_table, print_hanging, unpadded
from forge.views.text import one_line, short_name


class _Templates(Formatter):
    """`str.format` with one value, whose keys and attributes are the fields, in the formats of `formatting`."""

    def __init__(self, formats: Mapping[str, Callable[[Any], str]]):
        self._formats = {"line": one_line, **formats}

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        (value,) = args
        for name in field_name.split(".") if not field_name.isdigit() else ():
            if value is not None:
                if isinstance(value, Mapping):
                    value = value[name]
                else:
                    value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return formatted(value, format_spec, self._formats)


def fill(template: str, value: Any, **formats: Callable[..., str]) -> str:
    """Return the template with its fields taken from `value`: `{}` is the value itself."""
    return _Templates(formats).vformat(template, (value,), {})


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings, if there are any; it draws itself. The first `names` columns stand to the left."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    names: int = 1
    styles: Mapping[int, str] | None = None
    """Column → style."""
    lefts: Sequence[int] = ()
    """Columns beside those that stand to the left too."""
    wraps: bool | Sequence[int] = False
    """Whether cells, or those of some columns, may be broken where the screen is too narrow."""
    cut: Sequence[int] = ()
    """Columns whose cells are cut with an ellipsis there."""

    @classmethod
    def of(
        cls,
        items: Iterable[Any],
        *columns: str,
        formats: Mapping[str, Callable[..., str]] = {},
        row_style: Callable[[Any], str] | None = None,
        grouped: int = 0,
        **more: Any,
    ) -> "Table":
        """Build a table with a row per item and a column per `heading: template`. formats: further format names for
        templates. row_style: returns an item's style. grouped: this many first cells are left empty where they repeat
        the row above. more: other fields of the table."""
        parts = [column.partition(": ") for column in columns]
        rows: list[list[str | Text]] = []
        above: list[str] = []
        for item in items:
            cells = [fill(template, item, **formats) for _, _, template in parts]
            group = cells[:grouped]
            if group and group == above:
                cells[:grouped] = [""] * grouped
            above = group
            rows.append([Text(cell, row_style(item)) for cell in cells] if row_style else [*cells])
        return cls([heading for heading, _, _ in parts], rows, **more)

    def rich(self) -> RichTable:
        table = new_table() if any(self.headings) else RichTable(box=None, show_header=False, pad_edge=False)
        for number, heading in enumerate(self.headings):
            style = (self.styles or {}).get(number)
            wraps = self.wraps if isinstance(self.wraps, bool) else number in self.wraps
            overflow: OverflowMethod = "ellipsis" if number in self.cut else "fold"
            table.add_column(heading, style=style, no_wrap=not wraps, overflow=overflow)
            table.columns[number].justify = "left" if number < self.names or number in self.lefts else "right"
        for row in self.rows:
            table.add_row(*row)
        return table

    def fits(self, console: Console) -> bool:
        options = console.options.update(max_width=1000)
        return console.measure(self.rich(), options=options).maximum <= console.width


@dataclass(frozen=True)
class Fitting:
    """Groups of tables that say the same, the widest first: the first that fits the screen is drawn."""

    groups: Sequence[Sequence[Table]]

    def parts(self, console: Console) -> "list[Part]":
        fitting = (group for group in self.groups if all(table.fits(console) for table in group))
        return [part for table in next(fitting, self.groups[-1]) for part in (None, table)]


def labelled(rows: Iterable[tuple[str | Text, str | Text]], wraps: Sequence[int] = (1,)) -> Table:
    """Build a table without headings: a name in grey, and what is said of it. wraps: which columns may be broken."""
    return Table(("", ""), [*rows], names=2, styles={0: QUIET}, wraps=wraps)


def sides(names: Sequence[str], items: Sequence[Any], *rows: str, gains: Mapping[str, float | None] = {}) -> RichTable:
    """Draw items side by side, each under its name and in its colour. A row is a heading and a template. gains: heading
    → the second's figure over the first's."""
    table = new_table()
    table.add_column("")
    for index, name in enumerate(names):
        style = sequence_style(index)
        table.add_column(Text(short_name(name), style), header_style=f"{TITLE} {style}", min_width=10)
    table.add_column("")
    for row in rows:
        heading, _, template = row.partition(": ")
        gain = formatted(gains[heading], "times") if heading in gains else ""
        table.add_row(Text(heading, QUIET), *(fill(template, item) for item in items), gain)
    return table


def question(text: str, *about: str) -> "list[Part]":
    """Return the beginning of a screen: what is asked, of what, and an empty line."""
    return [title(text), *about, None]


def leads_on(text: str) -> "Part":
    """Return the end of a screen: where to go from here."""
    return lambda width: [None, Text(text, ACCENT)]


def sentences(texts: Iterable[str]) -> "Iterable[Part]":
    """Turn texts into parts in the console's own colour."""
    return map(Text, texts)


@dataclass(frozen=True)
class Hanging:
    """A line whose continuations, where it does not fit, are set in."""

    text: Text
    indent: int


Part = str | Text | Table | RichTable | Fitting | Hanging | Callable[[int], "Iterable[Part]"] | None
"""A part of a screen: a table, a sentence (grey if it is a `str`), a function of the width, or None: an empty line."""


def title(text: str, style: str = TITLE) -> Text:
    return Text(text, style)


def unbroken(text: str, style: str = "") -> Text:
    """Return a line that a narrow screen does not break, such as a path that is to be copied."""
    return Text(text, style, overflow="ignore")


def trouble(text: str) -> Text:
    return Text(text, TROUBLE)


def check(holds: bool, claim: str, otherwise: str = "") -> Text:
    """Format a check: `✓ the same tokens`, or `✗ not the same tokens`."""
    return Text(f"✓ {claim}", GOOD) if holds else trouble(f"✗ {otherwise or f'not {claim}'}")


def marked(holds: bool, words: str) -> Text:
    """Format words after a ✓ or a ✗, which alone is coloured."""
    return Text.assemble(("✓ ", GOOD) if holds else ("✗ ", TROUBLE), words)


def draw(console: Console, parts: "Iterable[Part]") -> None:
    for part in parts:
        if isinstance(part, Table | RichTable):
            draw(console, unpadded(console, part.rich() if isinstance(part, Table) else part))
        elif isinstance(part, Fitting):
            draw(console, part.parts(console))
        elif isinstance(part, Hanging):
            print_hanging(console, part.text, part.indent)
        elif callable(part):
            draw(console, part(console.width))
        else:
            line = Text(part, QUIET) if isinstance(part, str) else part or Text()
            console.print(line, soft_wrap=line.overflow == "ignore")


@dataclass(frozen=True)
class Report:
    """A command's result: for JSON, for the screen, and as an exit status."""

    facts: Mapping[str, Any]
    """The facts that `--json` prints, and that a chapter's text may name. Nothing in them is rounded."""
    draw: Callable[[Console], None]
    """Draws it at the width that the console has now; may be called again at another."""
    status: int = 0
    """The exit status."""

    def as_json(self) -> "Report":
        """Return the same findings, drawn as one JSON object."""
        return Report(self.facts, lambda console: console.print(to_json(self.facts), soft_wrap=True), self.status)


def report(facts: Mapping[str, Any], screen: "Callable[[], Iterable[Part]]", status: int = 0) -> Report:
    """Build what a command returns: facts, and a screen that is drawn each time it is asked for."""
    return Report(facts, lambda console: draw(console, screen()), status)
