"""Draws the blocks of a chapter as lines on a console, at its present width; or all of it without a pause, for a pipe,
for tests, for `--no-pause`."""

import re
from collections.abc import Callable

from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from forge.book.chapter import Block, Check, Finding, Predict, Prose, Recap, Run, Source, Step, Verdict
from forge.book.session import CLOSE, Session, choice_name, explanation
from forge.book.source_code import Excerpt, excerpt
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_hanging, unpadded
from forge.views.text import one_line

MAX_WIDTH = 96
"""Prose is set no wider: longer lines are hard to follow."""
MAX_SOURCE_WIDTH = 124
UNKNOWN = "This run does not tell."
REFUTED = "Not so in this run. It follows from how the engine works, so this is a bug in forge."
_LIT = "▌"
_COMMENT = re.compile(r"(?:^\s*|  )(# .*)$")
_MARK = 2
"""Columns of a claim's ✓ and the space behind it."""
_STYLES = {
    TITLE: "h1 h2 h3 table.header",
    ACCENT: "code link",
    QUIET: "item.bullet item.number table.border link_url",
}
_THEME = Theme({f"markdown.{name}": style for style, names in _STYLES.items() for name in names.split()})


class _Picture(markdown.CodeBlock):
    """A fenced block, indented and otherwise unchanged: pictures made of characters, and commands to type."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), no_wrap=True, overflow="ignore"), (0, 0, 0, 2))


class _Heading(markdown.Heading):
    """A heading, underlined so that it differs from text on terminals without bold type."""

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
    """Draw the rule over a page: `── 1 · A forward pass ───────── 3 / 9 ──`."""
    width = console.width
    place = f" {place} ──" if place else ""
    heading = f" {number} · {one_line(title)}"[: max(0, width - len(place) - 5)] + " "
    line = Text.assemble(("──", QUIET), (heading, TITLE), no_wrap=True, overflow="crop")
    line.append("─" * (width - line.cell_len - len(place)) + place, QUIET)
    console.print(line)


def draw_step(console: Console, step: Step, session: Session) -> None:
    """Draw a step's blocks with an empty line between two."""
    for index, block in enumerate(step):
        if index:
            console.print()
        draw_block(console, block, session)


def draw_block(console: Console, block: Block, session: Session, height: int | None = None) -> None:
    """Draw one block. height: lines of the screen, to which source is shortened."""
    if isinstance(block, Prose):
        draw_prose(console, session.fill(block.text))
    elif isinstance(block, Run):
        draw_run(console, block, session)
    elif isinstance(block, Source):
        draw_source(console, excerpt(block.dotted, block.light, block.spans, block.omitted), height)
    elif isinstance(block, Predict):
        _draw_question(console, block, session)
    elif isinstance(block, Verdict):
        _draw_verdict(console, block.predict, session)
    elif isinstance(block, Finding):
        draw_prose(console, session.finding(block) or UNKNOWN)
    elif isinstance(block, Check):
        _draw_check(console, block, session)
    elif isinstance(block, Recap):
        _draw_recap(console, block, session)


def draw_prose(console: Console, text: str) -> None:
    with console.use_theme(_THEME):
        prose = _Markdown(text, hyperlinks=console.is_terminal and not console.is_dumb_terminal)
        lines = [*unpadded(console, prose, min(console.width, MAX_WIDTH))]
        while lines and not lines[0].plain:
            lines.pop(0)
        while lines and not lines[-1].plain:
            lines.pop()
        for line in lines:
            console.print(line, soft_wrap=True)


def draw_command(console: Console, command: str) -> None:
    console.print(Text.assemble(("$ ", QUIET), (command, ACCENT)))


def draw_run(console: Console, run: Run, session: Session) -> None:
    """Draw the command, and its report if it has run, or why it is left out."""
    if session.leaves_out(run):
        draw_prose(console, session.fill(run.unclaimed))
        return
    draw_command(console, session.command(run))
    if run in session.reports:
        console.print()
        _draw_report(console, run, session)


def _draw_report(console: Console, run: Run, session: Session) -> None:
    """Draw what a run found, with a warning if other programs disturbed it."""
    session.reports[run].draw(console)
    load = session.loads.get(run)
    if load is not None and load.is_busy:
        console.print()
        print_hanging(console, Text(load.sentence, TROUBLE), 0, MAX_WIDTH)


def draw_source(console: Console, shown: Excerpt, height: int | None = None) -> None:
    """Draw an excerpt between two rules: highlighted lines have a bar before them, and the rest is dimmed if any is
    highlighted.

    Of an excerpt that is higher than `height` the lines that matter are shown and those around them.
    """
    width = min(console.width, MAX_SOURCE_WIDTH)
    lines = _source_lines(shown, width)
    room = min(height or 0, len(shown.lines))
    while height is not None and len(lines) > height - 2 and room:
        room -= 1
        lines = _source_lines(shown.shortened(room), width)
    where = f"{shown.path}:{shown.first_line} · {shown.name}"
    console.print(Rule(Text(where, TITLE), align="left", style=QUIET), width=width)
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(Rule(style=QUIET), width=width)


def _source_lines(shown: Excerpt, width: int) -> list[Text]:
    code = Syntax("", "python", theme="ansi_dark", background_color="default").highlight("\n".join(shown.lines))
    lines = []
    for index, line in enumerate(code.split("\n", allow_blank=True)[: len(shown.lines)]):
        line.rstrip()
        is_lit = index in shown.lit
        if index in shown.elided:
            line = Text(line.plain, QUIET)
        for piece in _wrapped(line, max(width - 2, 20)):
            if bool(shown.lit) and not is_lit:
                piece.stylize(Style(dim=True))
            elif is_lit:
                piece.stylize(TITLE)
            gutter = Text(f"{_LIT} ", ACCENT) if is_lit else Text("  ")
            lines.append(Text.assemble(gutter, piece, no_wrap=True, overflow="ignore"))
            lines[-1].rstrip()
    return lines


def _wrapped(line: Text, room: int) -> list[Text]:
    """Split a line of source into pieces that fit; a trailing comment moves to a line of its own above."""
    if line.cell_len <= room:
        return [line]
    indent = len(line.plain) - len(line.plain.lstrip())
    comment = _COMMENT.search(line.plain)
    if comment is None:
        return _folded(line, room, indent + (0 if line.plain.lstrip().startswith('"""') else 4))
    code, note = line.divide([comment.start(1)])
    code.rstrip()
    pieces = _folded(Text.assemble(" " * indent, note), room, indent, "# ")
    return [*pieces, *_folded(code, room, indent + 4)] if code else pieces


def _folded(line: Text, room: int, indent: int, mark: str = "") -> list[Text]:
    """Continue an overlong line below, with `mark` before each continuation."""
    pieces = [line]
    indent = min(indent, room // 2)
    while pieces[-1].cell_len > room:
        rest = pieces.pop()
        begins = len(rest.plain) - len(rest.plain.lstrip()) + len(mark)
        cut = rest.plain.rfind(" ", begins + 1, room) + 1 or room
        first, after = rest.divide([cut])
        first.rstrip()
        pieces += [first, Text.assemble(" " * indent, (mark, QUIET), after)]
    return pieces


def _draw_question(console: Console, predict: Predict, session: Session) -> None:
    console.print(Text("Predict", f"{TITLE} {ACCENT}"))
    draw_prose(console, session.fill(predict.question))
    for index, choice in enumerate(predict.choices):
        name = f"  {choice_name(index)}  "
        print_hanging(console, Text.assemble((name, ACCENT), session.fill(choice.text)), len(name), MAX_WIDTH)
    if predict in session.guesses:
        console.print(Text(f"\nYou said {session.guesses[predict].text}.", QUIET))


def _draw_verdict(console: Console, predict: Predict, session: Session) -> None:
    verdict = session.verdict(predict)
    draw_prose(console, f"*{session.fill(predict.short_question)}*")
    told = Text(verdict or session.fill(predict.untold) or UNKNOWN, f"{TITLE} {ACCENT}")
    print_hanging(console, told, 0, MAX_WIDTH)
    told_why = explanation(predict, session.measured) if verdict else ""
    if told_why:
        draw_prose(console, told_why)


def _draw_check(console: Console, check: Check, session: Session) -> None:
    symbols = {True: ("✓ ", GOOD), False: ("✗ ", TROUBLE), None: ("· ", QUIET)}
    for judged in session.judge(check.claims):
        sentence = Text.assemble(symbols[judged.holds], session.fill(judged.claim.sentence))
        print_hanging(console, sentence, _MARK, MAX_WIDTH)
        if judged.holds:
            continue
        why = session.fill(judged.claim.unclaimed) if judged.unclaimed else UNKNOWN
        if judged.holds is False:
            why = session.fill(judged.claim.otherwise) or REFUTED
        print_hanging(console, Text(f"{' ' * _MARK}{why}", QUIET), _MARK, MAX_WIDTH)


def _draw_recap(console: Console, recap: Recap, session: Session) -> None:
    """Draw what to remember, the reader's score, what to run next, and where `forge next` goes on."""
    texts = []
    right, judged = session.score()
    if judged:
        score = f"Your predictions: {right} of {judged} right, or within a factor of {CLOSE}."
        texts.append(Text(score, f"{TITLE} {ACCENT}"))
    if recap.commands:
        commands = [Text.assemble(("  ", QUIET), (command, ACCENT)) for command in recap.commands]
        texts.append(Text("\n").join([Text("To run next:"), *commands]))
    if session.goes_on:
        texts.append(Text(session.goes_on))
    if recap.lines:
        draw_prose(console, session.fill("\n".join(["## To remember", "", *(f"- {line}" for line in recap.lines)])))
    for index, text in enumerate(texts):
        if index or recap.lines:
            console.print()
        console.print(text)


def lines_of(console: Console, draw: Callable[[Console], None]) -> list[str]:
    """Return what `draw` prints, line by line and with its colours, instead of printing it."""
    with console.capture() as captured:
        draw(console)
    return captured.get().rstrip("\n").split("\n")


FAILED = 1
"""The exit status when something that the chapter claims was not so."""


def print_chapter(console: Console, number: int, session: Session) -> int:
    """Print the chapter, running each experiment where it stands. Returns the exit status."""
    draw_title(console, number, session.chapter.title)
    status = 0
    for step in session.steps():
        status = max(status, _print_step(console, step, session))
        if status > FAILED:  # an experiment was interrupted
            break
    return status


def _print_step(console: Console, step: Step, session: Session) -> int:
    status = 0
    for block in step:
        console.print()
        if isinstance(block, Run) and not session.leaves_out(block):
            draw_command(console, session.command(block))
            console.print()
            status = max(status, session.perform(block).status)
            _draw_report(console, block, session)
        else:
            draw_block(console, block, session)
        if isinstance(block, Check) and block.certain:
            is_refuted = any(judged.holds is False for judged in session.judge(block.claims))
            status = max(status, FAILED if is_refuted else 0)
    return status
