"""`forge rerank`: the documents of a file in the order of their relevance to a query."""

from typing import Annotated, Any, cast

import typer

from forge.cli import options
from forge.cli.answering import counting, load_answering
from forge.cli.running import Found

_QUERY = "Query"


def rerank(
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
    model: options.ModelOption = "tales",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    oneshot_tokens: options.OneshotTokensOption = None,
    oneshot_memory: options.OneshotMemoryOption = None,
    json: options.JsonOption = False,
) -> Found:
    """The lines of a file in the order of their relevance to a query.

    [dim]forge rerank --query "who found the lantern" lines.txt[/dim]
    """
    from forge.views.answers import print_ranking, ranking_object
    from forge.views.report import Report

    documents = options.read_prompts(file)
    loading = {"device": device, "threads": threads, "max_model_len": max_model_len}
    llm = load_answering(model, **loading, oneshot_tokens=oneshot_tokens, oneshot_memory=oneshot_memory)
    with counting("rerank") as on_progress:
        scores = llm.rerank(query, documents, instruction, by=cast(Any, by), on_progress=on_progress)  # it checks `by`
    report = Report(
        {"model": llm.model_name, "query": query, "by": by, "ranking": ranking_object(documents, scores, by)},
        lambda console: print_ranking(console, query, documents, scores, by),
    )
    return report.as_json() if json else report
