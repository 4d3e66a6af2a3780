"""`forge embed`: texts as vectors, and how near they are to each other."""

from typing import Annotated, Any, cast

import typer

from forge.cli import options
from forge.cli.arguments import command
from forge.cli.options import AnsweringEngine
from forge.cli.run_control import create_llm
from forge.views.answers import cosines_screen, embedding_object
from forge.views.progress import CountingBar
from forge.views.report import Report
from forge.views.screen import report
from forge.views.terminal import open_error_console


@command
def embed(
    engine: AnsweringEngine,
    texts: options.TextsArgument = None,
    file: options.FileOption = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            help="last: the last token's hidden state; mean: that of all.",
            show_default="as the model's file says, or last",
            rich_help_panel="Texts",
        ),
    ] = None,
) -> Report:
    """Texts as unit vectors, and the cosine of each two of them.

    [dim]forge embed "the fox found a lantern" "a lantern was found" "the sea is cold"[/dim]
    """
    inputs = options.read_texts(texts, file)
    llm = create_llm(engine)
    with CountingBar(open_error_console(), "embed") as on_progress:
        vectors = llm.embed(inputs, cast(Any, pooling), on_progress=on_progress)  # it checks `pooling`
    used = pooling or llm.pooling
    return report(
        {"model": llm.model_name, "pooling": used, **embedding_object(inputs, vectors)},
        lambda: cosines_screen(inputs, vectors, used),
    )
