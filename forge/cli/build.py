"""`forge build`: exercises in which the reader writes a part of the engine, and the engine runs on it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.engine_args import EngineArgs
from forge.exercises import running, session
from forge.exercises.catalog import available, find_entry
from forge.exercises.screens import (
    print_comparison,
    print_hint,
    print_list,
    print_result,
    print_solution,
    print_started,
)
from forge.exercises.session import load_builds, next_entry, save_builds
from forge.views.json_output import as_object
from forge.views.report import Report
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.exercises.catalog import Entry

build = typer.Typer(
    help="Write a part of the engine yourself: eleven exercises, checked, and run by the real engine.",
    rich_markup_mode="rich",
)

_POLL_SECONDS = 0.2

Number = Annotated[
    str | None, typer.Argument(metavar="[NUMBER]", help="Which exercise; without one, the one to go on with.")
]
FolderOption = Annotated[Path, typer.Option("--folder", help="Where your files are.")]
_FOLDER = Path("exercises")


@build.callback(invoke_without_command=True)
def list_exercises(ctx: typer.Context, folder: FolderOption = _FOLDER, json: options.JsonOption = False) -> Any:
    """Write a part of the engine yourself: eleven exercises, checked, and run by the real engine.

    [dim]forge build start 4[/dim]   write the file of exercise 4

    [dim]forge build check 4[/dim]   check what you have written
    """
    if ctx.invoked_subcommand is not None:
        return None

    builds, entries = load_builds(), available()
    started = {entry.number for entry in entries if (folder / entry.file_name).is_file()}
    facts = [
        {
            "number": entry.number,
            "name": entry.name,
            "title": entry.title,
            "chapter": entry.chapter,
            "started": entry.number in started,
            "passed": entry.number in builds.passed,
        }
        for entry in entries
    ]
    return _shown(
        Report(
            {"exercises": facts},
            lambda console: print_list(console, entries, builds.passed, started, next_entry(builds)),
        ),
        json,
    )


@build.command("start")
def start(number: Number = None, folder: FolderOption = _FOLDER) -> None:
    """Write the file of an exercise: what is given, and what to fill in. Never overwrites a file."""
    entry = _entry(number)
    print_started(open_console(), entry, str(session.start(entry, folder)))


@build.command("check")
def check(number: Number = None, folder: FolderOption = _FOLDER, json: options.JsonOption = False) -> Any:
    """Check whether your code keeps its promises. If not: which one, and the shortest sequence of calls that shows it.

    The exit status is 0 if it keeps them all, 1 if not.
    """
    entry = _entry(number)
    result = session.check(entry, session.path_of(entry, folder))
    report = Report(as_object(result), lambda console: print_result(console, entry, result), 0 if result.passed else 1)
    return _shown(report, json)


@build.command("run")
@command
def run(
    number: Number = None,
    folder: FolderOption = _FOLDER,
    *,
    engine: Annotated[EngineArgs, Takes("model")],
    json: options.JsonOption = False,
) -> Any:
    """Run the real engine on your code, and compare tokens and speed with the engine's own."""
    entry = _entry(number)
    comparison = running.run(entry, session.path_of(entry, folder), str(engine.model))
    return _shown(
        Report(
            running.facts(comparison),
            lambda console: print_comparison(console, entry, comparison),
            0 if comparison.identical else 1,
        ),
        json,
    )


@build.command("hint")
def hint(number: Number = None) -> None:
    """One hint further each time; the last one stays."""
    entry = _entry(number)
    builds, hints = load_builds(), entry.exercise().hints
    builds.hints[entry.number] = min(builds.hints.get(entry.number, 0) + 1, len(hints))
    save_builds(builds)
    print_hint(open_console(), entry, hints, builds.hints[entry.number])


@build.command("solution")
def solution(number: Number = None) -> None:
    """The engine's own source."""
    print_solution(open_console(), _entry(number).exercise())


@build.command("watch")
def watch(number: Number = None, folder: FolderOption = _FOLDER) -> None:
    """Check again whenever the file is saved. Ctrl-C ends it."""
    entry = _entry(number)
    path, checked = session.path_of(entry, folder), None
    console = open_console()
    while True:
        saved = path.stat().st_mtime_ns if path.is_file() else checked  # an editor may replace the file
        if saved != checked:
            checked = saved
            if console.is_terminal:
                console.clear()
            print_result(console, entry, session.check(entry, path))
        time.sleep(_POLL_SECONDS)


def _entry(number: str | None) -> "Entry":

    return find_entry(number) if number is not None else next_entry(load_builds()) or available()[-1]


def _shown(report: Report, json: bool) -> Report:
    return report.as_json() if json else report
