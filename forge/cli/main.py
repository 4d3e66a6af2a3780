"""The console script: which commands there are, and what becomes of an error.

Importing this module loads typer and nothing heavier, so that `forge --help` answers at once: a command's module is
imported when the command is named. A new command is a function in a module of its own and a line in the table here.
"""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from forge import __version__, experiments
from forge.errors import INTERRUPTED, ForgeError, UsageError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from forge.views.screen import Report

CLOSED_PIPE = 141
"""The exit status that a shell reports of a program that SIGPIPE ended."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a file that output was sent to takes no more of it."""
RENAMED = {
    "--oneshot-tokens": "--prefill-only-tokens",
    "--oneshot-memory": "--prefill-only-memory",
    "--mode": "--preemption",
}
"""An option's former name → its name now."""
_COMPLETION = ("install_completion", "show_completion")


PANELS: dict[str, dict[str, str]] = {
    "Chapters": {
        "chapters": "List the chapters, and how far you have come.",
        "chapter": "Read a chapter: the same as its own command, whose options it takes.",
        "next": "Go on where you stopped.",
        "review": "Ask again what you answered wrong in a chapter, from the next day on.",
        **experiments.summaries(),
        "build": "Write a part of the engine yourself: thirteen exercises, checked, and run by the real engine.",
        "glossary": "Say what a term or a symbol on a screen means.",
        "tour": "Follow one request from HTTP to a token and back, with file and function at each station.",
    },
    "Run": {
        "generate": "Continue a prompt, and watch what every forward costs.",
        "chat": "Talk with a model. Its cache stays between turns: a turn computes only what is new.",
        "classify": "Label probabilities of texts, from one forward pass each.",
        "score": "The log-probability of each token of a continuation, their total, and the perplexity.",
        "logprobs": "The log-probability of every token of a text, and what else could have stood there.",
        "embed": "Texts as unit vectors, and the cosine of each two of them.",
        "rerank": "The lines of a file in the order of their relevance to a query.",
        "trace-scheduler": "Run many requests at once and see who runs, who waits, and why.",
    },
    "Inspect": {
        "replay": "Show a recorded run again, step through it, or tell one request's story. Loads no model.",
        "trace": "Turn a recorded run into other formats.",
        "models": "List models, look into a file, make one up, or download one.",
        "doctor": "Look over this machine: Python, CPU, memory, libraries, GPU, models. Exit status 1 if something "
        "needs mending.",
    },
    "Measure": {
        "compare": "Run one prompt, or those of a file, on two sides that differ in one option, given as A vs B.",
        "bench": "Measure speed beside llama.cpp and transformers, the caches, the engine, speculation, or the "
        "accuracy of quantization.",
    },
    "Serve": {
        "serve": "Serve a model over HTTP, as OpenAI's API has it.",
        "engines": "Change how many engines a server has (Ray Serve), or their model. No request fails.",
        "watch": "Show every step of a server as it happens. Ctrl-C ends the watching; the server goes on.",
    },
}
"""The commands under the headings of the list, and what it says of each. `forge NAME` is the function, or the group of
commands, of that name in `forge.cli.NAME`, or an experiment."""
_ELSEWHERE = {
    "answers": ("classify", "embed", "logprobs", "rerank", "score"),
    "chapters": ("chapter", "glossary", "next", "review", "tour"),
    "replay": ("trace",),
    "serve": ("engines", "watch"),
}
"""From a module of `forge.cli` to the commands in it that have no module of their own name."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "chapter": {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}},
}


class _Commands(TyperGroup):
    """The commands. A command's module is imported when it is named, not when all are listed."""

    def __init__(self, **attrs: Any):
        super().__init__(**attrs)
        for panel, commands in PANELS.items():
            for name, summary in commands.items():
                self.add_command(TyperCommand(name, help=summary, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        if name in self.commands:
            self.commands[name] = _loaded(name)
            self.commands[name].name = name


def _loaded(name: str) -> TyperCommand | TyperGroup:
    from forge.cli.parsing import Command, adopt, command_of
    from forge.cli.versus import VersusCommand

    help = None
    if name in experiments.summaries():
        defined, help = experiments.load(name)
    else:
        function = "next_chapter" if name == "next" else name.replace("-", "_")  # Python has a `next`
        module = next((module for module, names in _ELSEWHERE.items() if name in names), function)
        defined = getattr(import_module(f"forge.cli.{module}"), function)
    if isinstance(defined, typer.Typer):
        adopt(defined.registered_commands)
        group = typer.main.get_group(defined)
        group.help = next(commands[name] for commands in PANELS.values() if name in commands)
        return group
    parser = VersusCommand if name == "compare" else Command
    return command_of(defined, name, parser, help=help, **_SETTINGS.get(name, {}))


app = typer.Typer(
    name="forge",
    cls=_Commands,
    help="LLM serving, step by step: run a Qwen3 model and watch every technique at work.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="[dim]forge --install-completion[/dim] teaches your shell to complete commands, models and options.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"forge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def run() -> NoReturn:
    """Run the process's own arguments and exit."""
    sys.unraisablehook = _interrupt_again
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    sys.exit(main(sys.argv[1:]))


def main(args: Sequence[str]) -> int:
    """Run one command line; return the exit status. A user's mistake becomes one line on standard error."""
    _forget_impossible_sizes()
    try:
        status = _invoke(args)
        sys.stdout.flush()
        return status
    except Exception as error:
        if _is_closed_pipe(error):
            _discard_output()
            return CLOSED_PIPE
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            raise
        _discard_output()
        return _complain(ForgeError(f"cannot write: {error.strerror}"))
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _discard_output()  # typer's own console wrote help, and the reader had enough of it
        return 0


def _invoke(args: Sequence[str]) -> int:
    try:
        outcome = parse_and_run(args)
        return outcome or 0 if isinstance(outcome, int | None) else _show(outcome)
    except ForgeError as error:
        return _complain(error)
    except MemoryError:
        return _complain(ForgeError("out of memory: take a smaller model, or a smaller --max-model-len"))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def parse_and_run(args: Sequence[str]) -> "Report | int | None":
    """Run a command and return what it returns: a report that is not yet shown, or an exit status.

    Raises whatever the command raises, and `UsageError` for a line that typer cannot parse.
    """
    try:
        return _forge()(args=list(args), prog_name="forge", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # how typer's own usage errors are told from bugs
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), end="")  # nothing, where typer has printed the help itself
            return UsageError.exit_code
        raise _usage_error(error) from None


def command_named(name: str) -> TyperCommand | TyperGroup | None:
    """Return the command, or the group of commands, called NAME in `forge NAME`."""
    group = _forge()
    group.load(name)
    command = group.commands.get(name)
    assert command is None or isinstance(command, TyperCommand | TyperGroup)
    return command


def _forge() -> _Commands:
    """Group all commands. The options that set up a shell's completion work and are not listed: they are used once."""
    group = typer.main.get_command(app)
    assert isinstance(group, _Commands)
    for param in group.params:
        if isinstance(param, TyperOption):
            param.hidden = param.name in _COMPLETION
    return group


def _show(report: "Report") -> int:
    from forge.views.terminal import open_console

    report.draw(open_console())
    return report.status


def _usage_error(error: Any) -> UsageError:
    """Explain what typer found wrong with the command line, and where to look."""
    option = getattr(error, "option_name", "")
    if option == "--kv" and type(error).__name__ == "BadOptionUsage":
        from forge.cli.parsing import without_value

        return without_value(option)
    if option in RENAMED:
        message = f"{option} is called {RENAMED[option]} now"
    elif re.match(r"-\d", option):
        message = "a number of tokens must not be negative"
    else:
        message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return UsageError(f"{message} (see {context.command_path if context else 'forge'} --help)")


def _complain(error: ForgeError) -> int:
    from forge.views.text import one_line

    print(f"forge: {one_line(str(error))}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
    return error.exit_code


def _interrupt_again(unraisable: "UnraisableHookArgs") -> None:
    """Python discards an exception in a callback of its own (a weak reference's, a finalizer), Ctrl-C too: once the
    callback is over, interrupt again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    with suppress(RuntimeError):  # the interpreter ends already
        while True:
            try:
                return threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            except KeyboardInterrupt:  # on a busy machine it comes before this has returned
                continue


def _forget_impossible_sizes() -> None:
    """Drop COLUMNS and LINES where they are no size: with COLUMNS=0 nothing would be shown."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0").isdecimal():
            del os.environ[name]


def _is_closed_pipe(error: Exception) -> bool:
    if isinstance(error, BrokenPipeError):
        return True
    terminal = sys.modules.get("forge.views.terminal")
    return terminal is not None and isinstance(error, terminal.ClosedPipe)


def _open_closed_streams() -> None:
    """Let a standard stream that the caller closed (`forge … >&-`) lead to nothing: Python has None in its place, and
    the next file opened would get its number."""
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (as long as the process)


def _discard_output() -> None:
    """Point standard output at nothing, so that flushing it at exit cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
