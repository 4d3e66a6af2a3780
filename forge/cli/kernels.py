"""`forge kernels`: chapter 3. Its experiment: what does a forward pass wait for, with one row and with many?"""

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found

if TYPE_CHECKING:
    from forge.views.report import Report


def kernels(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model to measure.",
            show_default="one that is made up, larger than a processor's cache",
            rich_help_panel="Model",
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="Make it up in this type; may be repeated.",
            show_default="Q8_0 and Q4_0",
            rich_help_panel="Model",
        ),
    ] = None,
    threads: options.ThreadsOption = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    """3. Decode is bound by memory, prefill by arithmetic.

    [dim]forge kernels --only run --type F16 --type Q4_0[/dim]
    """
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    report = _measure(model, types, threads)
    return report.as_json() if json else report


def _measure(model: str | None, types: list[str] | None, threads: int | None) -> "Report":
    from forge.bench.kernels import DEFAULT_TYPES, run
    from forge.views.bench import BenchProgress
    from forge.views.kernels import kernels_object, print_kernels
    from forge.views.report import Report
    from forge.views.terminal import open_error_console

    with BenchProgress(open_error_console()) as progress:
        result = run(model, tuple(types or DEFAULT_TYPES), threads, progress)
    return Report(kernels_object(result), lambda console: print_kernels(console, result))
