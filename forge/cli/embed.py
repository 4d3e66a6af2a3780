"""`forge embed`: texts as vectors, and how near they are to each other."""

from typing import Annotated, Any, cast

import typer

from forge.cli import options
from forge.cli.answering import counting, load_answering
from forge.cli.running import Found


def embed(
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
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    oneshot_tokens: options.OneshotTokensOption = None,
    oneshot_memory: options.OneshotMemoryOption = None,
    json: options.JsonOption = False,
) -> Found:
    """Texts as unit vectors, and the cosine of each two of them.

    [dim]forge embed "the fox found a lantern" "a lantern was found" "the sea is cold"[/dim]
    """
    from forge.views.answers import embedding_object, print_cosines
    from forge.views.report import Report

    inputs = options.read_texts(texts, file)
    loading = {"device": device, "threads": threads, "max_model_len": max_model_len}
    llm = load_answering(model, **loading, oneshot_tokens=oneshot_tokens, oneshot_memory=oneshot_memory)
    with counting("embed") as on_progress:
        vectors = llm.embed(inputs, cast(Any, pooling), on_progress=on_progress)  # it checks `pooling`
    used = pooling or llm.pooling
    report = Report(
        {"model": llm.model_name, "pooling": used, **embedding_object(inputs, vectors)},
        lambda console: print_cosines(console, inputs, vectors, used),
    )
    return report.as_json() if json else report
