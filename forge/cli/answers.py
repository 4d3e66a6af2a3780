"""`forge classify`, `score`, `logprobs`, `embed` and `rerank`: what one forward pass says of a text.

Several texts run together, and what they begin with is computed once.
"""

from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import create_llm
from forge.engine.tasks import classify_prompt
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.views import answers
from forge.views.progress import CountingBar
from forge.views.screen import Report, report
from forge.views.terminal import open_error_console

AnsweringEngine = Annotated[EngineArgs, Takes("model Model prefill_only_tokens prefill_only_memory", kv="prefix")]
TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT...", help="One text or several; - reads standard input.")
]
_TEXTS, _QUERY = "Texts", "Query"
_LABELS_NEEDED = "--labels takes two labels or more with commas: --labels happy,sad"


@dataclass(frozen=True)
class AnswerArgs:
    """The options of commands that ask about texts; each command takes its own part. Raises `UsageError` for a
    negative `top`."""

    labels: str | None = option(
        None, "The labels, with commas.", _TEXTS, shown="those of the model's classification head"
    )
    question: str | None = option(
        None, "What is asked about each text.", _TEXTS, shown="which of the labels it is, in one word"
    )
    raw: bool = option(False, "A text is the whole prompt, and nothing is asked.", _TEXTS)
    file: str | None = option(None, "More texts, one to a line.", _TEXTS, flags="--file -f")
    pooling: str | None = option(
        None,
        "last: the last token's hidden state; mean: that of all.",
        _TEXTS,
        shown="as the model's file says, or last",
    )
    by: str = option(
        "answer",
        'answer: "yes" against "no" in Qwen3-Reranker\'s form; embedding: the cosine of the embeddings.',
        _QUERY,
    )
    instruction: str | None = option(None, "With --by answer: the task.", _QUERY, shown="Qwen3-Reranker's own")
    top: int = option(0, "List this many of the likeliest tokens at each place.", "Output")

    def __post_init__(self) -> None:
        if self.top < 0:
            raise UsageError(f"--top is a number of tokens, and not {self.top}")


def _bar(title: str) -> CountingBar:
    return CountingBar(open_error_console(), title)


@command
def classify(
    engine: AnsweringEngine,
    texts: TextsArgument = None,
    *,
    asked: Annotated[AnswerArgs, Takes("labels question raw file")],
) -> Report:
    """Label probabilities of texts, from one forward pass each.

    [dim]forge classify --labels happy,sad "The mole lost his crown, and he wept all night."[/dim]

    [dim]forge classify --labels happy,sad --file stories.txt[/dim]

    A model with a classification head has labels of its own and reads each text as it is.
    """
    names = [name.strip() for name in (asked.labels or "").split(",") if name.strip()]
    if len(names) == 1:
        raise UsageError(_LABELS_NEEDED)
    inputs = options.read_texts(texts, asked.file)
    llm = create_llm(engine)
    if not names and not llm.model.labels:
        raise UsageError(_LABELS_NEEDED)
    raw = asked.raw or not names
    prompts = inputs if raw else [classify_prompt(llm.tokenizer, text, names, asked.question) for text in inputs]
    with _bar("classify") as on_progress:
        found = llm.classify(prompts, names, on_progress=on_progress)
    return report(
        {"model": llm.model_name, "results": answers.classification_object(inputs, found)},
        lambda: answers.classification_screen(inputs, found),
    )


@command
def score(
    engine: AnsweringEngine,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What comes before; may be empty.")],
    continuation: Annotated[str, typer.Argument(metavar="CONTINUATION", help="What is scored; - reads stdin.")],
    asked: Annotated[AnswerArgs, Takes("top")],
) -> Report:
    """The log-probability of each token of a continuation, their total, and the perplexity.

    [dim]forge score "Once upon a time" ", when the first snow fell"[/dim]
    """
    return _scored(engine, prompt, options.read_prompt(continuation), asked.top)


@command
def logprobs(
    engine: AnsweringEngine,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What is scored; - reads standard input.")],
    asked: Annotated[AnswerArgs, Takes("top", top=5)],
) -> Report:
    """The log-probability of every token of a text, and what else could have stood there.

    [dim]forge logprobs "Once upon a time" --top 5[/dim]
    """
    return _scored(engine, "", options.read_prompt(text), asked.top)


def _scored(engine_args: EngineArgs, prompt: str, continuation: str, top: int) -> Report:
    llm = create_llm(engine_args)
    top = min(top, llm.model.vocab_size)
    with _bar("score") as on_progress:
        (scored,) = llm.score([(prompt, continuation)], top, on_progress=on_progress)
    token_text = llm.tokenizer.token_text
    facts = {"model": llm.model_name, "prompt": prompt, "continuation": continuation}
    return report(
        facts | answers.score_object(scored, token_text),
        lambda: answers.score_screen(prompt, scored, top, token_text),
    )


@command
def embed(
    engine: AnsweringEngine, texts: TextsArgument = None, *, asked: Annotated[AnswerArgs, Takes("file pooling")]
) -> Report:
    """Texts as unit vectors, and the cosine of each two of them.

    [dim]forge embed "the fox found a lantern" "a lantern was found" "the sea is cold"[/dim]
    """
    inputs = options.read_texts(texts, asked.file)
    llm = create_llm(engine)
    with _bar("embed") as on_progress:
        vectors = llm.embed(inputs, cast(Any, asked.pooling), on_progress=on_progress)  # it checks `pooling`
    used = asked.pooling or llm.pooling
    return report(
        {"model": llm.model_name, "pooling": used, **answers.embedding_object(inputs, vectors)},
        lambda: answers.cosines_screen(inputs, vectors, used),
    )


@command
def rerank(
    engine: AnsweringEngine,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Documents, one to a line.")],
    query: Annotated[str, typer.Option("--query", "-q", help="What is looked for.", rich_help_panel=_QUERY)],
    asked: Annotated[AnswerArgs, Takes("by instruction")],
) -> Report:
    """The lines of a file in the order of their relevance to a query.

    [dim]forge rerank --query "who found the lantern" lines.txt[/dim]
    """
    documents, by = options.read_prompts(file), asked.by
    llm = create_llm(engine)
    with _bar("rerank") as on_progress:
        scores = llm.rerank(query, documents, asked.instruction, by=cast(Any, by), on_progress=on_progress)
    return report(
        {"model": llm.model_name, "query": query, "by": by, "ranking": answers.ranking_object(documents, scores, by)},
        lambda: answers.ranking_screen(query, documents, scores, by),
    )
