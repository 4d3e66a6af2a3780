"""Blocks of a chapter as lines on a console, at whatever width it has now."""

from collections.abc import Callable

from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from forge.book.chapter import Block, Check, Finding, Predict, Prose, Run, Source, Step, Verdict
from forge.book.reading import Reading, choice_name
from forge.book.source_code import Excerpt, excerpt
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_hanging
from forge.views.text import one_line

MAX_WIDTH = 96
"""Prose is set no wider: longer lines are hard to follow."""
MAX_SOURCE_WIDTH = 124
UNKNOWN = "This run does not tell."
REFUTED = "Not so in this run. It follows from how the engine works, so this is a bug in forge."
UNEXPECTED = "Not so in this run: this machine, or the options that you gave, make the difference."
DISTURBED = "Not so in this run: other programs kept the machine busy."
_LIT = "▌"
_MARK = 2
"""Columns of a claim's ✓ and the space behind it."""
_THEME = Theme(
    {
        "markdown.h1": TITLE,
        "markdown.h2": TITLE,
        "markdown.h3": TITLE,
        "markdown.code": ACCENT,
        "markdown.item.bullet": QUIET,
        "markdown.item.number": QUIET,
        "markdown.table.border": QUIET,
        "markdown.table.header": TITLE,
        "markdown.link": ACCENT,
        "markdown.link_url": QUIET,
    }
)


class _Picture(markdown.CodeBlock):
    """A fenced block as it stands, set in a little: pictures made of characters, and commands to type."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), no_wrap=True, overflow="ignore"), (0, 0, 0, 2))


class _Heading(markdown.Heading):
    """Underlined, so that it can be told from a line of text without bold type too."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text
        yield Text("─" * min(self.text.cell_len, options.max_width), QUIET)


class _Markdown(markdown.Markdown):
    elements = {  # noqa: RUF012 (rich's own)
        **markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Picture,
        "code_block": _Picture,
    }


def draw_title(console: Console, number: int, title: str, place: str = "") -> None:
    """The rule over a page: `── 1 · A forward pass ───────── 3 / 9 ──`."""
    width = console.width
    place = f" {place} ──" if place else ""
    heading = f" {number} · {one_line(title)}"[: max(0, width - len(place) - 5)] + " "
    line = Text.assemble(("──", QUIET), (heading, TITLE), no_wrap=True, overflow="crop")
    line.append("─" * (width - line.cell_len - len(place)) + place, QUIET)
    console.print(line)


def draw_step(console: Console, step: Step, reading: Reading) -> None:
    """All of a step's blocks, an empty line between two."""
    for index, block in enumerate(step):
        if index:
            console.print()
        draw_block(console, block, reading)


def draw_block(console: Console, block: Block, reading: Reading) -> None:
    if isinstance(block, Prose):
        draw_prose(console, reading.fill(block.text))
    elif isinstance(block, Run):
        draw_run(console, block, reading)
    elif isinstance(block, Source):
        draw_source(console, excerpt(block.dotted, block.light, block.start, block.stop))
    elif isinstance(block, Predict):
        _draw_question(console, block, reading)
    elif isinstance(block, Verdict):
        _draw_verdict(console, block.predict, reading)
    elif isinstance(block, Finding):
        draw_prose(console, reading.finding(block) or UNKNOWN)
    elif isinstance(block, Check):
        _draw_check(console, block, reading)


def draw_prose(console: Console, text: str) -> None:
    with console.use_theme(_THEME):
        _print(console, _Markdown(text, hyperlinks=console.is_terminal and not console.is_dumb_terminal))


def draw_command(console: Console, command: str) -> None:
    console.print(Text.assemble(("$ ", QUIET), (command, ACCENT)))


def draw_run(console: Console, run: Run, reading: Reading) -> None:
    """The command, and what it found if it has been run."""
    draw_command(console, reading.command(run))
    report = reading.reports.get(run)
    if report is not None:
        console.print()
        report.draw(console)
        draw_other_load(console, run, reading)


def draw_other_load(console: Console, run: Run, reading: Reading) -> None:
    """A sentence where other programs disturbed the run."""
    load = reading.loads.get(run)
    if load is not None and load.is_busy:
        console.print(Text(f"\n{load.sentence}", TROUBLE))


def draw_source(console: Console, shown: Excerpt) -> None:
    """The lines between two rules, those that matter with a bar before them and the others dimmed where any is."""
    width = min(console.width, MAX_SOURCE_WIDTH)
    where = f"{shown.path}:{shown.first_line} · {shown.name}"
    console.print(Rule(Text(where, TITLE), align="left", style=QUIET), width=width)
    if shown.cut_before:
        console.print(Text("  …", QUIET))
    code = Syntax("", "python", theme="ansi_dark", background_color="default").highlight("\n".join(shown.lines))
    for index, line in enumerate(code.split("\n", allow_blank=True)[: len(shown.lines)]):
        _draw_line(console, line, index in shown.lit, dim=bool(shown.lit), width=width)
    if shown.cut_after:
        console.print(Text("  …", QUIET))
    console.print(Rule(style=QUIET), width=width)


def _draw_line(console: Console, line: Text, lit: bool, dim: bool, width: int) -> None:
    """One line of source; what does not fit goes on below, set in further than it began."""
    line.rstrip()
    indent = len(line.plain) - len(line.plain.lstrip()) + 4
    room = max(width - 2, indent + 16)
    pieces = [line]
    while pieces[-1].cell_len > room:
        rest = pieces.pop()
        cut = rest.plain.rfind(" ", indent, room) + 1 or room
        first, after = rest.divide([cut])
        pieces += [first, Text.assemble(" " * indent, after)]
    for piece in pieces:
        if dim and not lit:
            piece.stylize(Style(dim=True))
        elif lit:
            piece.stylize(TITLE)
        gutter = Text(f"{_LIT} ", ACCENT) if lit else Text("  ")
        shown = Text.assemble(gutter, piece, no_wrap=True, overflow="ignore")
        shown.rstrip()
        console.print(shown, soft_wrap=True)


def _draw_question(console: Console, predict: Predict, reading: Reading) -> None:
    console.print(Text("Predict", f"{TITLE} {ACCENT}"))
    draw_prose(console, reading.fill(predict.question))
    for index, choice in enumerate(predict.choices):
        console.print(Text.assemble((f"  {choice_name(index)}  ", ACCENT), reading.fill(choice.text)))
    if predict in reading.guesses:
        console.print(Text(f"\nYou said {reading.guesses[predict].text}.", QUIET))


def _draw_verdict(console: Console, predict: Predict, reading: Reading) -> None:
    verdict = reading.verdict(predict)
    draw_prose(console, f"*{reading.fill(predict.short_question)}*")
    console.print(Text(verdict or UNKNOWN, f"{TITLE} {ACCENT}"))
    explanation = reading.explanation(predict) if verdict else ""
    if explanation:
        draw_prose(console, explanation)


def _draw_check(console: Console, check: Check, reading: Reading) -> None:
    marks = {True: ("✓ ", GOOD), False: ("✗ ", TROUBLE), None: ("· ", QUIET)}
    for judged in reading.judge(check.claims):
        sentence = Text.assemble(marks[judged.holds], reading.fill(judged.claim.sentence))
        print_hanging(console, sentence, _MARK, MAX_WIDTH)
        if judged.holds is False:
            why = reading.fill(judged.claim.otherwise) or _why_not(check, reading)
            print_hanging(console, Text(f"{' ' * _MARK}{why}", QUIET), _MARK, MAX_WIDTH)
        elif judged.holds is None:
            console.print(Text(f"{' ' * _MARK}{UNKNOWN}", QUIET))


def _why_not(check: Check, reading: Reading) -> str:
    if check.certain:
        return REFUTED
    return DISTURBED if reading.machine_was_busy else UNEXPECTED


def lines_of(console: Console, draw: Callable[[Console], None]) -> list[str]:
    """What `draw` prints, line by line, with its colours, instead of printing it."""
    with console.capture() as captured:
        draw(console)
    return captured.get().rstrip("\n").split("\n")


def _print(console: Console, renderable) -> None:
    """Print set no wider than is good to read, without spaces that would pad each line to the full width."""
    options = console.options.update(width=min(console.width, MAX_WIDTH))
    lines = console.render_lines(renderable, options, pad=False)
    while lines and not "".join(segment.text for segment in lines[0]).strip():
        lines.pop(0)
    while lines and not "".join(segment.text for segment in lines[-1]).strip():
        lines.pop()
    for line in lines:
        console.print(Segments([*_stripped(line), Segment.line()]), end="", soft_wrap=True)


def _stripped(line: list[Segment]) -> list[Segment]:
    """Without the white space at its end."""
    kept = list(line)
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept
