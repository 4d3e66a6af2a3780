"""The console script: which commands there are, and what becomes of an error.

Importing this module loads typer and nothing heavier, so that `forge --help` answers at once: every command imports
what it needs when it runs.
"""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from forge import __version__, experiments
from forge.cli.bench import bench
from forge.cli.build import build
from forge.cli.chapters import chapter, chapters, next_chapter
from forge.cli.chat import chat
from forge.cli.classify import classify
from forge.cli.compare import compare
from forge.cli.doctor import doctor
from forge.cli.embed import embed
from forge.cli.generate import generate
from forge.cli.models import models
from forge.cli.options import KV_KINDS
from forge.cli.replay import replay, trace
from forge.cli.rerank import rerank
from forge.cli.running import INTERRUPTED
from forge.cli.score import logprobs, score
from forge.cli.serve import serve
from forge.cli.trace_scheduler import trace_scheduler
from forge.cli.versus import VersusCommand
from forge.cli.watch import watch
from forge.errors import ForgeError, UsageError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from forge.views.report import Report

CLOSED_PIPE = 141
"""What a shell reports of a program that SIGPIPE ended."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a file that output was sent to takes no more of it."""
_COMPLETION = ("install_completion", "show_completion")


class _Commands(TyperGroup):
    """The commands. An experiment is imported when it is named, not when all are listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        if name in experiments.summaries():
            function, doc = experiments.load(name)
            one = typer.Typer(add_completion=False, rich_markup_mode="rich")
            one.command(name, help=doc)(function)
            self.commands[name] = typer.main.get_command(one)


app = typer.Typer(
    name="forge",
    cls=_Commands,
    help="LLM serving, step by step: run a Qwen3 model and watch every technique at work.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="[dim]forge --install-completion[/dim] teaches your shell to complete commands, models and options.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


_CHAPTERS, _RUN, _INSPECT, _MEASURE, _SERVE = "Chapters", "Run", "Inspect", "Measure", "Serve"
_ANY_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("chapters", rich_help_panel=_CHAPTERS)(chapters)
app.command("chapter", rich_help_panel=_CHAPTERS, context_settings=_ANY_OPTIONS)(chapter)
app.command("next", rich_help_panel=_CHAPTERS)(next_chapter)
for name, summary in experiments.summaries().items():
    app.command(name, help=summary, rich_help_panel=_CHAPTERS)(lambda: None)
app.add_typer(build, name="build", rich_help_panel=_CHAPTERS)

app.command("generate", rich_help_panel=_RUN)(generate)
app.command("chat", rich_help_panel=_RUN)(chat)
app.command("classify", rich_help_panel=_RUN)(classify)
app.command("score", rich_help_panel=_RUN)(score)
app.command("logprobs", rich_help_panel=_RUN)(logprobs)
app.command("embed", rich_help_panel=_RUN)(embed)
app.command("rerank", rich_help_panel=_RUN)(rerank)
app.command("trace-scheduler", rich_help_panel=_RUN)(trace_scheduler)

app.command("replay", rich_help_panel=_INSPECT)(replay)
app.add_typer(trace, name="trace", rich_help_panel=_INSPECT)
app.add_typer(models, name="models", rich_help_panel=_INSPECT)
app.command("doctor", rich_help_panel=_INSPECT)(doctor)

app.command("compare", rich_help_panel=_MEASURE, cls=VersusCommand)(compare)
app.add_typer(bench, name="bench", rich_help_panel=_MEASURE)

app.command("serve", rich_help_panel=_SERVE)(serve)
app.command("watch", rich_help_panel=_SERVE)(watch)


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
        found = parse_and_run(args)
        return found or 0 if isinstance(found, int | None) else _show(found)
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
    """The command, or the group of commands, that `forge NAME` is."""
    group = _forge()
    group.load(name)
    found = group.commands.get(name)
    assert found is None or isinstance(found, TyperCommand | TyperGroup)
    return found


def _forge() -> _Commands:
    """All commands. The options that set up a shell's completion work and are not listed: they are used once."""
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
    """What typer found wrong with the command line, and where to look. Of `--kv` without a value, the values too."""
    option = getattr(error, "option_name", "")
    if option == "--kv" and type(error).__name__ == "BadOptionUsage":
        missing = UsageError(f"--kv takes one of {', '.join(KV_KINDS)}")
        for kind, what in KV_KINDS.items():
            missing.add_note(f"  {kind:8}{what}")
        return missing
    if re.match(r"-\d", option):
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
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()


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
