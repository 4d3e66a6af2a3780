"""`forge replay` and `forge trace export`: a recorded run without the model that made it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.options import OutputArgs
from forge.cli.run_control import Found
from forge.errors import UsageError, file_error
from forge.trace.recorder import read_trace
from forge.views import run_summary
from forge.views.formatting import count
from forge.views.history import History
from forge.views.scheduler import print_step_line, scheduler_lines
from forge.views.screen import Report, draw, report
from forge.views.stepper import Stepper, require_terminal
from forge.views.summary import RunLabel
from forge.views.terminal import can_redraw, open_console, open_error_console

if TYPE_CHECKING:
    from forge.trace.recorder import Trace

TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="What --trace has written.", dir_okay=False)]

trace = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@command
def replay(
    file: TraceArgument,
    output: Annotated[OutputArgs, Takes("step svg json")],
    seq: Annotated[int | None, typer.Option("--seq", metavar="NUMBER", help="One sequence's story.")] = None,
    view: Annotated[
        str | None, typer.Option("--view", metavar="NAME", help="Another view; a wrong NAME lists them.")
    ] = None,
) -> Found:
    """Show a recorded run again, step through it, or tell one request's story. Loads no model.

    [dim]forge trace-scheduler --requests 64 --trace run.jsonl; forge replay run.jsonl --step[/dim]
    [dim]forge replay run.jsonl --seq 27[/dim]
    """
    console = open_console()
    if output.step:
        require_terminal(console)
    recorded = read_trace(file)
    if recorded.note:
        open_error_console().print(f"{options.shown_path(file)}: {recorded.note}", soft_wrap=True)
    history = _history(recorded)
    if seq is not None:
        return _story(history, seq)
    if view is not None:
        return run_summary.view_report(view, history)
    if output.step and history.records:
        with Stepper(console, history) as stepper:
            stepper.walk()
        return 0
    if output.svg is not None:
        from forge.views.picture import save_serving

        save_serving(output.svg, history)
    summary = run_summary.serving_object(history.label, history.records, history.requests()) if output.json else {}
    return Report(summary, lambda console: _show(console, history))


def _story(history: "History", seq_id: int) -> "Report":
    request = run_summary.request_of(history.requests(), seq_id)
    return report(run_summary.request_object(request), lambda: run_summary.story_screen(request, history.records))


def _history(recorded: "Trace") -> "History":
    header = recorded.header
    label = RunLabel(header.model, header.kv, header.device, header.device_description)
    history = History(label, header.max_num_seqs, header.order)
    for record in recorded.steps:
        history.feed(record)
    history.end(recorded.ends)
    return history


def _show(console, history: History) -> None:
    """Every step as a line in a pipe, the last step's picture on a terminal; then what it came to."""
    if can_redraw(console) and history.records:
        draw(console, scheduler_lines(history, len(history) - 1, console.width, console.height))
    elif history.records:
        for record in history.records:
            print_step_line(console, record)
    console.print()
    draw(console, run_summary.serving_screen(history, history.requests(), " · recorded"))


@trace.command("export")
def export(
    file: TraceArgument,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="For ui.perfetto.dev and chrome://tracing.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to.", show_default="FILE.perfetto.json", dir_okay=False),
    ] = None,
) -> None:
    """Write a recorded run in a format that other tools open.

    [dim]forge trace export run.jsonl --perfetto[/dim]
    """
    import json

    from forge.trace.perfetto import perfetto_object

    if not perfetto:
        raise UsageError("say into which format: --perfetto")
    recorded = read_trace(file)
    target = out or file.with_name(f"{file.name.removesuffix('.jsonl')}.perfetto.json")
    if target == file:
        raise UsageError(f"{target} is the trace itself: give another file to --out")
    document = perfetto_object(recorded)
    try:
        target.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise file_error(f"{target}: cannot write", error) from None
    steps, events = count(len(recorded.steps)), count(len(document["traceEvents"]))
    note = f" ({recorded.note})" if recorded.note else ""
    written = f"{options.shown_path(target)}: {steps} steps, {events} events{note}. Open it at ui.perfetto.dev"
    open_console().print(written, soft_wrap=True)
