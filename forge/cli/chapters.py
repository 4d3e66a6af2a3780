"""The book on the command line: `forge chapters`, `forge chapter N`, `forge next`, and how a chapter's own command,
such as `forge naive`, becomes the chapter.

A chapter's command is its experiment too: `--only run` (or `--json`) runs that alone. Inside a chapter its experiments
are command lines with `--only run`, run in this process.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from forge.book.catalog import entries, find
from forge.book.chapter import Verdict
from forge.book.drawing import print_chapter
from forge.book.given import Given, Syntax, each
from forge.book.pager import Pager
from forge.book.progress import (
    Progress,
    chapter_objects,
    chapters_screen,
    due,
    load_progress,
    next_entry,
    save_progress,
    settle,
)
from forge.book.session import Session
from forge.cli import completion, options
from forge.cli.arguments import Takes, command
from forge.cli.options import OutputArgs
from forge.cli.parsing import is_whole
from forge.cli.run_control import INTERRUPTED, Found
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import flag_of, option
from forge.views.formatting import plural
from forge.views.keys import is_listening
from forge.views.screen import Report, report
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.book.catalog import Entry
    from forge.book.chapter import Chapter

_MODEL_OF_BUGS = "tales"
UNNOTICED = 1
"""The exit status when nothing caught the bug, or the engine fails without it."""

_CHAPTER = "Chapter"


@dataclass(frozen=True)
class ChapterArgs:
    """How a chapter is read, or what of it runs alone."""

    only: str | None = option(None, "run: the experiment without the chapter's text.", _CHAPTER)
    pause: bool = option(True, "Wait for a key after each page.", _CHAPTER)
    bug: str | None = option(
        None,
        "Put one known bug back into the engine, on the bundled model, and see what catches it; a wrong NAME lists "
        "them.",
        _CHAPTER,
        metavar="NAME",
    )


_NOT_GIVEN = ("only", "pause", "json")
_ALONE = "run"
_COUNTS = ("requests", "prompt_tokens", "max_tokens", "sequences")
"""Options that must be at least 1 and are no field of a dataclass that checks it."""


@command
def chapters() -> Report:
    """List the chapters, and how far you have come."""
    listed = chapter_objects(entries(), load_progress())
    return report({"chapters": listed}, lambda: chapters_screen(listed))


@command
def glossary(
    term: Annotated[str | None, typer.Argument(metavar="TERM", help="A term, or a symbol of a screen.")] = None,
) -> Report:
    """Say what a term or a symbol on a screen means.

    [dim]forge glossary prefill[/dim]
    """
    from forge.book.glossary import find_term, load_glossary, print_glossary, print_term

    every = load_glossary()
    if term is None:
        return Report({"terms": [asdict(entry) for entry in every]}, lambda console: print_glossary(console, every))
    entry = find_term(term, every)
    return Report(asdict(entry), lambda console: print_term(console, entry))


@command
def tour(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the request says.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Argument(metavar="MAX_TOKENS", help="Tokens to generate.", min=1)] = 8,
    *,
    engine_args: Annotated[EngineArgs, Takes("model")],
    output: Annotated[OutputArgs, Takes("svg json")],
) -> Found:
    """Follow one request from HTTP to a token and back, with file and function at each station.

    [dim]forge tour --svg tour.svg[/dim]
    """
    from forge.book.tour import take_tour, tour_screen
    from forge.cli.serve import require_server, steps_of

    if not prompt:
        raise UsageError("the prompt is empty: give it at least one word")
    require_server()
    findings = take_tour(str(engine_args.model), prompt, max_tokens, lambda url: steps_of(url, None))
    found = report(findings.as_json(), lambda: tour_screen(findings))
    if output.svg is not None:
        from forge.views.picture import save_picture

        save_picture(output.svg, found.draw, "forge tour")
    return found


def chapter(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="CHAPTER", help="Its number, or its command.", autocompletion=completion.chapters),
    ],
) -> Found:
    """Read a chapter: the same as its own command, whose options it takes."""
    from forge.cli.main import parse_and_run

    return parse_and_run([find(name).command, *ctx.args])


@command
def next_chapter(reading: Annotated[ChapterArgs, Takes("pause")]) -> Found:
    """Go on where you stopped."""
    progress = load_progress()
    entry = next_entry(entries(), progress)
    if entry is None:
        open_console().print("You have finished every chapter. forge chapters lists them.")
        return 0
    return _read(entry, pause=reading.pause, page=progress.pages.get(entry.command))


def review() -> Found:
    """Ask again what you answered wrong in a chapter, from the next day on."""
    from datetime import date

    from forge.book.drawing import draw_block
    from forge.book.session import parse_guess
    from forge.views.keys import read_line

    progress, console, today = load_progress(), open_console(), date.today()
    asked = list(due(progress, entries(), today))
    if not asked:
        later = f" {plural(len(progress.review), 'question')} will be asked later." if progress.review else ""
        console.print(f"Nothing to review today.{later}", highlight=False)
    right = 0
    for question in asked:
        session = Session(question.entry.chapter, run_reported)
        console.print(f"Chapter {question.entry.number}", highlight=False)
        draw_block(console, question.predict, session)
        while question.predict not in session.guesses:
            line = read_line("Your answer: ")
            if line is None:
                return 0
            try:
                session.guesses[question.predict] = parse_guess(question.predict, line)
            except UsageError as error:
                console.print(f"That should be {error}.", highlight=False)
        right += settle(progress, question, session.guesses[question.predict], today)
        save_progress(progress)
        draw_block(console, Verdict(question.predict), session)
        console.print()
    if asked:
        console.print(f"{right} of {len(asked)} right. What was wrong is asked again tomorrow.", highlight=False)
    return 0


class Experiment(NamedTuple):
    """A chapter's experiment whose options have been checked."""

    run: Callable[[], Report]
    alone: bool = False
    """Whether it runs without `--only run` too, because it is not part of the chapter."""


def experiment(bugs: bool = False) -> Callable[[Callable[..., Experiment]], Callable[..., Found]]:
    """Makes a chapter's command of a function that checks its options and returns the experiment to run.

    The command has --only, --pause and --json, and --bug where the chapter has bugs. It opens the chapter, unless it is
    to run the experiment alone. The function may ask for `json`.
    """

    def decorate(prepare: Callable[..., Experiment]) -> Callable[..., Found]:
        declared = signature(prepare, eval_str=True)
        stated = [option for name, option in declared.parameters.items() if name != "json"]

        def run(ctx: typer.Context, reading: ChapterArgs, json: bool, **arguments: Any) -> Found:
            if reading.bug is not None:
                _check_bug_options(ctx)
                return _run_bug(ctx.command.name or "", reading.bug, arguments["engine"])
            prepared = prepare(**arguments, **({"json": json} if "json" in declared.parameters else {}))
            if reads_chapter(reading.only, json) and not prepared.alone:
                return read_chapter(ctx, reading.pause)
            return prepared.run()

        taken = Annotated[ChapterArgs, Takes(without="" if bugs else "bug")]
        parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context), *stated]
        parameters.append(Parameter("reading", Parameter.KEYWORD_ONLY, annotation=taken))
        parameters.append(Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=options.JsonOption))
        keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = declared.replace(parameters=keywords, return_annotation=Found)  # type: ignore[attr-defined]
        run.__name__ = prepare.__name__
        return command(run)

    return decorate


_OF_A_BUG = ("bug", "device", "threads", *_NOT_GIVEN)
"""The options that a run with `--bug` takes: it has its own requests, on the bundled model."""


def _run_bug(chapter: str, name: str, engine_args: EngineArgs) -> Report:
    """Run one of a chapter's bugs, which compares texts of the bundled model, with the device and threads of
    `engine_args`."""
    from forge.book.bugs import bug_object, bug_screen, find_bug, run_with_and_without
    from forge.cli.run_control import create_llm

    bug = find_bug(name, chapter)
    loading = {"device": engine_args.device, "threads": engine_args.threads}
    if bug.loading.get("device", engine_args.device) == "reference":
        del loading["threads"]  # which that device has none of
    runs = run_with_and_without(bug, lambda: create_llm(_MODEL_OF_BUGS, **{**loading, **bug.loading}))
    is_caught = runs.sound.failure is None and runs.caught_by is not None
    return report(bug_object(runs), lambda: bug_screen(runs), 0 if is_caught else UNNOTICED)


def _check_bug_options(ctx: typer.Context) -> None:
    """Raise `UsageError` for an option that `--bug` would ignore."""
    ignored = [name for name in ctx.params if name not in _OF_A_BUG and options.was_given(ctx, name)]
    if ignored:
        arguments = {param.name for param in ctx.command.params if param.param_type_name == "argument"}
        named = ", ".join(name.upper() if name in arguments else flag_of(name) for name in ignored)
        raise UsageError(f"--bug runs requests of its own on the bundled model: leave {named} out")


def reads_chapter(only: str | None, json: bool) -> bool:
    """Return whether a chapter's command is to open the chapter, and not just to run its experiment.

    Raises `UsageError` for an `--only` that has no meaning.
    """
    if only not in (None, _ALONE):
        raise UsageError(f"--only takes {_ALONE}, and {only!r} is something else")
    return only is None and not json


def read_chapter(ctx: typer.Context, pause: bool) -> int:
    """Open the chapter whose command `ctx` is, with the options that it was given. Returns the exit status."""
    values = {
        name: options.read_prompt(value) if name == "prompt" else _as_written(value)
        for name, value in ctx.params.items()
        if name not in _NOT_GIVEN and options.was_given(ctx, name)
    }
    _check(values)
    return _read(find(ctx.command.name or ""), pause=pause, overrides=Given(values))


def _check(values: Mapping[str, str | tuple[str, ...]]) -> None:
    """Refuse what no run of a chapter could take before its first page is shown.

    Raises `UsageError`.
    """
    from forge.model.catalog import is_hash_model, resolve_model

    models = [model for name in ("model", "draft") for model in each(values.get(name, ()))]
    for model in models:
        if not is_hash_model(model):
            resolve_model(model)
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if texts.get("prompt") == "":
        raise UsageError("the prompt is empty: give it at least one word")
    for name in _COUNTS:
        if is_whole(texts.get(name, "")) and int(texts[name]) < 1:
            named = name if name == "max_tokens" else flag_of(name)  # which is an argument of some chapters
            raise UsageError(f"{named} must be at least 1, got {texts[name]}")


def _as_written(value: object) -> str | tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read(entry: "Entry", *, pause: bool, overrides: "Given | None" = None, page: int | None = None) -> int:
    """Read a chapter. page: where to go on, with what an earlier session found; None to begin."""
    console = open_console()
    session, progress = new_session(entry.chapter, overrides), load_progress()
    waits = pause and console.is_terminal and is_listening()
    if waits or not pause:
        session.goes_on = _goes_on(entry, progress)
    if overrides is not None and overrides.values:
        session.commands = {run: with_given(run.command, overrides) for run in entry.chapter.runs()}
    if not waits:
        status = print_chapter(console, entry.number, session)
        if not pause and status == 0:  # asked for: in a pipe the text may be read by a program
            progress.reach(entry.command, last_page := len(entry.chapter.steps()) - 1, last_page + 1)
            save_progress(progress)
        return status
    pager = Pager(console, entry, session, progress, run_shell_line)
    if page is not None:
        pager.resume()
    elif left := progress.pages.get(entry.command):
        page = pager.choose_page(left)
        if page is None:
            return 0
    return pager.read(page or 0)


def _goes_on(entry: "Entry", progress: Progress) -> str:
    """Return which chapter `forge next` opens once this one is finished, in a sentence."""
    finished = Progress({**progress.pages}, {*progress.finished})
    finished.reach(entry.command, 0, 1)
    following = next_entry(entries(), finished)
    if following is None:
        return "This was the last chapter that you had not finished."
    return f"forge next goes on with chapter {following.number}, forge {following.command}."


def new_session(chapter: "Chapter", overrides: "Given | None" = None) -> "Session":
    from forge.book.given import model_facts

    values = {name: each(value)[0] for name, value in (overrides.values if overrides else {}).items() if each(value)}
    options_of_facts = {"name": "model", "kv_dtype": "kv_dtype", "device": "device"}
    options_given = {name: values[option] for name, option in options_of_facts.items() if option in values}
    model = model_facts(**options_given) if "model" in chapter.names else {}
    return Session(chapter, run_reported, model=model, given=tuple(overrides.values) if overrides else ())


def run_reported(line: str) -> Report:
    """Run a command line that begins with forge, in this process; return what it found.

    Raises `ForgeError` as the command does, `UsageError` for one that cannot be run in a chapter, and
    `KeyboardInterrupt` where Ctrl-C ended it.
    """
    from forge.cli.main import parse_and_run

    outcome = parse_and_run(_words(line))
    if outcome == INTERRUPTED:
        raise KeyboardInterrupt
    if not isinstance(outcome, Report):
        raise UsageError(f"{line}: only commands that measure can be run here; `:` runs any other")
    return outcome


def run_shell_line(line: str) -> int:
    """Run a command line, with or without forge before it, as a shell would."""
    from forge.cli.main import main

    words = line.split() if line.count('"') % 2 or line.count("'") % 2 else shlex.split(line)
    return main(words[1:] if words[:1] == ["forge"] else words)


def with_given(line: str, overrides: Given) -> str:
    """Put what the reader gave into a command line of a chapter."""
    from forge.cli.main import command_named

    words = _words(line)
    command: Any = command_named(words[0])
    depth = 1
    while hasattr(command, "commands") and words[depth : depth + 1]:  # `bench oneshot`: a command in a group
        command, depth = command.get_command(None, words[depth]), depth + 1
    if command is None:
        return line
    name, args = words[:depth], words[depth:]
    arguments = [param.name for param in command.params if param.param_type_name == "argument"]
    taking = [param for param in command.params if param.param_type_name == "option" and not param.is_flag]
    if "--bug" in args:
        arguments, taking = [], [param for param in taking if param.name in _OF_A_BUG]
    syntax = Syntax(tuple(arguments), {spelling: param.name for param in taking for spelling in param.opts})
    return shlex.join(["forge", *name, *overrides.applied(args, syntax)])


def _words(line: str) -> list[str]:
    """Return the words after forge. Raises `UsageError` if there is no forge, or a quotation mark is missing."""
    try:
        words = shlex.split(line)
    except ValueError:
        raise UsageError(f"{line}: a quotation mark is missing") from None
    if words[:1] != ["forge"]:
        raise UsageError(f"{line}: a command line begins with forge")
    return words[1:]
