"""`forge rerank`: the documents of a file in the order of their relevance to a query."""

from typing import Annotated, Any, cast

import typer

from forge.cli import options
from forge.cli.arguments import command
from forge.cli.options import AnsweringEngine
from forge.cli.run_control import create_llm
from forge.views.answers import ranking_object, ranking_screen
from forge.views.progress import CountingBar
from forge.views.report import Report
from forge.views.screen import report
from forge.views.terminal import open_error_console

_QUERY = "Query"


@command
def rerank(
    engine: AnsweringEngine,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Documents, one to a line.")],
    query: Annotated[
        str, typer.Option("--query", "-q", help="What is looked for.", show_default=False, rich_help_panel=_QUERY)
    ],
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help='answer: "yes" against "no" in Qwen3-Reranker\'s form; embedding: the cosine of the embeddings.',
            rich_help_panel=_QUERY,
        ),
    ] = "answer",
    instruction: Annotated[
        str | None,
        typer.Option(
            "--instruction",
            help="With --by answer: the task.",
            show_default="Qwen3-Reranker's own",
            rich_help_panel=_QUERY,
        ),
    ] = None,
) -> Report:
    """The lines of a file in the order of their relevance to a query.

    [dim]forge rerank --query "who found the lantern" lines.txt[/dim]
    """
    documents = options.read_prompts(file)
    llm = create_llm(engine)
    with CountingBar(open_error_console(), "rerank") as on_progress:
        scores = llm.rerank(query, documents, instruction, by=cast(Any, by), on_progress=on_progress)  # it checks `by`
    return report(
        {"model": llm.model_name, "query": query, "by": by, "ranking": ranking_object(documents, scores, by)},
        lambda: ranking_screen(query, documents, scores, by),
    )
