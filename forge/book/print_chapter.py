"""A chapter from beginning to end without a pause: for a pipe, for tests, for `--no-pause`."""

from rich.console import Console

from forge.book.chapter import Check, Run, Step
from forge.book.drawing import draw_block, draw_command, draw_other_load, draw_title
from forge.book.session import Session

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
            report = session.perform(block)
            report.draw(console)
            draw_other_load(console, block, session)
            status = max(status, report.status)
        else:
            draw_block(console, block, session)
        if isinstance(block, Check) and block.certain and _is_refuted(block, session):
            status = max(status, FAILED)
    return status


def _is_refuted(check: Check, session: Session) -> bool:
    return any(judged.holds is False for judged in session.judge(check.claims))
