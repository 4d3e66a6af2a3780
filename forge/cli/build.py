"""`forge build`: exercises in which the reader writes a part of the engine, and the engine runs on it."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.exercises import ENTRIES, find_entry, session
from forge.exercises.screens import hints_screen, list_screen, print_result, print_solution, started_screen
from forge.exercises.session import load_builds, next_entry, save_builds
from forge.views.json_output import as_object, picked
from forge.views.screen import Report, draw, report
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.exercises import Entry

build = typer.Typer(rich_markup_mode="rich")

_POLL_SECONDS = 0.2

Number = Annotated[
    str | None, typer.Argument(metavar="[NUMBER]", help="Which exercise; without one, the one to go on with.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Where your files are; without it, exercises here, further up, or used last."),
]


@build.callback(invoke_without_command=True)
def list_exercises(ctx: typer.Context, folder: FolderOption = None, json: options.JsonOption = False) -> Any:
    """Write a part of the engine yourself: thirteen exercises, checked, and run by the real engine.

    [dim]forge build start 4[/dim]   write the file of exercise 4

    [dim]forge build check 4[/dim]   check what you have written
    """
    ctx.obj = folder, json
    if ctx.invoked_subcommand is not None:
        return None

    folder = session.find_folder(folder)
    builds, entries = load_builds(folder), ENTRIES
    started = {entry.number for entry in entries if (folder / entry.file_name).is_file()}
    facts = [
        {
            **picked(entry, "number", "name", "title", "chapter"),
            "started": entry.number in started,
            "passed": entry.number in builds.passed,
            "changed": entry.number in started and session.has_changed(entry, builds),
        }
        for entry in entries
    ]
    found = report(
        {"folder": str(folder), "exercises": facts},
        lambda: list_screen(entries, builds.passed, started, next_entry(builds), str(folder)),
    )
    return found.as_json() if json else found


@build.command("start")
def start(ctx: typer.Context, number: Number = None, folder: FolderOption = None) -> None:
    """Write the file of an exercise: what is given, and what to fill in. Never overwrites a file."""
    folder, entry = _chosen(ctx, folder, number)
    draw(open_console(), started_screen(entry, session.start(entry, folder)))


@build.command("reset")
def reset(ctx: typer.Context, number: Number = None, folder: FolderOption = None) -> None:
    """Begin an exercise again. Your file is kept under another name; its ✓ and its hints are forgotten."""
    folder, entry = _chosen(ctx, folder, number)
    draw(open_console(), started_screen(entry, *session.reset(entry, folder)))


@build.command("check")
@command
def check(ctx: typer.Context, number: Number = None, folder: FolderOption = None) -> Report:
    """Check whether your code keeps its promises. If not: which one, and the shortest sequence of calls that shows it.

    The exit status is 0 if it keeps them all, 1 if not.
    """
    folder, entry = _chosen(ctx, folder, number)
    result = session.check(entry, session.path_of(entry, folder))
    found = Report(as_object(result), lambda console: print_result(console, entry, result), 0 if result.passed else 1)
    return found.as_json() if ctx.obj[1] else found


@build.command("run")
@command
def run(
    ctx: typer.Context,
    number: Number = None,
    folder: FolderOption = None,
    *,
    engine_args: Annotated[EngineArgs, Takes("model")],
) -> Report:
    """Run the real engine on your code, and compare tokens and speed with the engine's own.

    The exit status is 0 if the tokens are the same, 1 if not.
    """
    folder, entry = _chosen(ctx, folder, number)
    found = session.run(entry, session.path_of(entry, folder), open_console(), str(engine_args.model))
    return found.as_json() if ctx.obj[1] else found


@build.command("hint")
def hint(
    ctx: typer.Context,
    number: Number = None,
    folder: FolderOption = None,
    again: Annotated[bool, typer.Option("--again", help="Show those that you have read once more.")] = False,
) -> None:
    """One hint further each time; the last one stays. With --again, all that you have read."""
    folder, entry = _chosen(ctx, folder, number)
    builds, hints = load_builds(folder), entry.exercise().hints
    read = builds.hints.get(entry.number, 0)
    shown = range(1, read + 1)
    if not (again and read):
        builds.hints[entry.number] = further = min(read + 1, len(hints))
        save_builds(folder, builds)
        shown = range(further, further + 1)
    draw(open_console(), hints_screen(entry, hints, shown))


@build.command("solution")
def solution(ctx: typer.Context, number: Number = None, folder: FolderOption = None) -> None:
    """The engine's own source. After passing: yours beside it, why it differs, and what each costs."""
    folder, entry = _chosen(ctx, folder, number)
    path = folder / entry.file_name
    has_passed = entry.number in load_builds(folder).passed and path.is_file()
    costs = session.compare_costs(entry, path) if has_passed else None
    print_solution(open_console(), entry, path if has_passed else None, costs)


@build.command("watch")
def watch(ctx: typer.Context, number: Number = None, folder: FolderOption = None) -> None:
    """Check again whenever the file is saved. Ctrl-C ends it."""
    folder, entry = _chosen(ctx, folder, number)
    path, checked = session.path_of(entry, folder), None
    console = open_console()
    while True:
        saved = path.stat().st_mtime_ns if path.is_file() else checked  # an editor may replace the file
        if saved != checked:
            checked = saved
            result = session.check(entry, path)
            if console.is_terminal:
                console.clear()
            print_result(console, entry, result, console.height - 1 if console.is_terminal else None)
        time.sleep(_POLL_SECONDS)


@build.command("engine", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def engine(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="COMMAND", help="generate, compare, trace-scheduler or serve.")],
    folder: FolderOption = None,
) -> int:
    """Run a command on an engine with all of your passed parts at once, and then its requests on forge's own.

    The command's own options follow. --kv, --speculate and --device choose parts; without them as many as can be.

    [dim]forge build engine generate "Once upon a time" 32[/dim]
    """
    from forge.exercises.own_engine import COMMANDS, engine_entries

    if name not in COMMANDS:
        raise UsageError(f"forge build engine runs {', '.join(COMMANDS)}, and not {name!r}")
    folder = _folder(ctx, folder)
    engine_entries(folder)
    return session.run_engine(folder, [name, *ctx.args])


def _folder(ctx: typer.Context, folder: Path | None) -> Path:
    """Return the folder that was given after the subcommand, or before it, or where the files are."""
    return session.find_folder(folder or ctx.obj[0])


def _chosen(ctx: typer.Context, folder: Path | None, number: str | None) -> "tuple[Path, Entry]":
    """Return the folder and the exercise; without a number, the one to go on with."""
    folder = _folder(ctx, folder)
    return folder, find_entry(number) if number is not None else next_entry(load_builds(folder)) or ENTRIES[-1]


if __name__ == "__main__":  # the process in which a reader's own engine runs a command: FOLDER COMMAND …
    from forge.cli.main import main
    from forge.exercises.own_engine import run_command

    sys.exit(run_command(Path(sys.argv[1]), sys.argv[2:], main))
