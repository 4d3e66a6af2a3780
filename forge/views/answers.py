"""The screens of answers that one forward pass gives: labels, scores, cosines, rankings; and the same for `--json`.

Log probabilities are tables: for each token how likely it was, and what else could have stood there.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forge.engine.tasks import Classification, Score
from forge.views.formatting import plural
from forge.views.json_output import picked
from forge.views.palette import ACCENT, QUIET, TITLE
from forge.views.terminal import new_table, print_table
from forge.views.text import one_line

if TYPE_CHECKING:
    import numpy as np

from collections.abc import Iterable
from math import exp

from rich.table import Table

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.task import Logprobs
from forge.views.text import quoted

TokenText = Callable[[int], str]


def output_table(
    sample: CompletionOutput, alternatives: int, token_text: TokenText, title: str = "output token"
) -> Table:
    """Build a table of each output token of `sample`. Expects `sample.logprobs`."""
    return _table(title, zip(sample.token_ids, sample.logprobs or (), strict=True), alternatives, token_text)


def prompt_table(output: RequestOutput, alternatives: int, token_text: TokenText) -> Table:
    """Build a table of each prompt token; the first has no probability, for nothing precedes it. Expects
    `output.prompt_logprobs`."""
    rows = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return _table("prompt token", rows, alternatives, token_text)


def score_table(found: Score, alternatives: int, token_text: TokenText) -> Table:
    """Build a table of each scored token, given all before it."""
    scored = ((token_id, logprob) for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True))
    rows = [
        (token[0], tuple(rivals) if token[0] in dict(rivals) else (*rivals, token))
        for token, rivals in zip(scored, found.alternatives, strict=True)
    ]
    return _table("token", rows, alternatives, token_text)


def _table(what: str, rows: Iterable[tuple[int, Logprobs | None]], alternatives: int, token_text: TokenText) -> Table:
    table = new_table(what, "logprob", "p")
    if alternatives:
        table.add_column("likeliest there", overflow="fold")
    for token_id, entry in rows:
        cells: list[Text | str] = [Text(quoted(token_text(token_id))), *_own(token_id, entry)]
        if alternatives:
            cells.append(_likeliest(entry or (), alternatives, token_text))
        table.add_row(*cells)
    return table


def _own(token_id: int, entry: Logprobs | None) -> list[str]:
    logprob = dict(entry).get(token_id) if entry is not None else None
    return ["–", "–"] if logprob is None else [f"{logprob:.3f}", f"{exp(logprob):.3f}"]


def _likeliest(entry: Sequence[tuple[int, float]], alternatives: int, token_text: TokenText) -> Text:
    return Text("   ").join(
        Text.assemble(quoted(token_text(token_id)), (f" {exp(logprob):.3f}", QUIET))
        for token_id, logprob in entry[:alternatives]
    )


def print_logprobs(
    console: Console,
    output: RequestOutput,
    logprobs: int | None,
    prompt_logprobs: int | None,
    token_text: TokenText,
) -> None:
    """The tables that were asked for: that of the prompt first, then one per sample."""
    tables = []
    if prompt_logprobs is not None and output.prompt_logprobs is not None:
        tables.append(prompt_table(output, prompt_logprobs, token_text))
    if logprobs is not None:
        several = len(output.outputs) > 1
        tables += [
            output_table(sample, logprobs, token_text, f"sample {sample.index}" if several else "output token")
            for sample in output.outputs
        ]
    for table in tables:
        console.print()
        print_table(console, table)


MOST_COSINES = 12
"""Texts up to which each is held against each other; of more, only the nearest of each is shown."""


def classification_object(texts: Sequence[str], found: Sequence[Classification]) -> list[dict[str, Any]]:
    return [
        {"text": text, **picked(classification, "label", "probabilities", "logprobs")}
        | ({} if classification.score is None else {"score": classification.score})
        for text, classification in zip(texts, found, strict=True)
    ]


def print_classifications(console: Console, texts: Sequence[str], found: Sequence[Classification]) -> None:
    """A text: each label with its probability, the likeliest first. Several: a line for each."""
    if len(found) == 1:
        (classification,) = found
        table = new_table("label", "probability", "logprob")
        for name in sorted(classification.probabilities, key=classification.probabilities.__getitem__, reverse=True):
            style = ACCENT if name == classification.label else ""
            cells = f"{classification.probabilities[name]:.3f}", f"{classification.logprobs[name]:.3f}"
            table.add_row(Text(one_line(name), style), *cells)
        print_table(console, table)
        return console.print(Text("probability: among the labels; logprob: among all that could come next", QUIET))
    names = list(found[0].probabilities)
    table = new_table("label", *map(one_line, names), last="text")
    for text, classification in zip(texts, found, strict=True):
        table.add_row(
            Text(one_line(classification.label), ACCENT),
            *(f"{classification.probabilities[name]:.3f}" for name in names),
            _shown(text),
        )
    print_table(console, table)
    counts = ", ".join(
        f"{one_line(name)} {sum(classification.label == name for classification in found)}" for name in names
    )
    console.print(Text(f"{plural(len(found), 'text')}: {counts}", QUIET))


def score_object(found: Score, token_text: Callable[[int], str]) -> dict[str, Any]:
    return {
        **picked(found, "total", "perplexity"),
        "tokens": [
            {
                "token_id": token_id,
                "token": token_text(token_id),
                "logprob": logprob,
                "top": [{"token_id": rival, "token": token_text(rival), "logprob": value} for rival, value in rivals],
            }
            for token_id, logprob, rivals in zip(found.token_ids, found.logprobs, found.alternatives, strict=True)
        ],
    }


def print_score(console: Console, prompt: str, found: Score, top: int, token_text: Callable[[int], str]) -> None:
    if prompt:
        console.print(Text(one_line(prompt), QUIET))
    print_table(console, score_table(found, top, token_text))
    console.print()
    tokens = plural(len(found.token_ids), "token")
    console.print(Text(f"{tokens} · total {found.total:.3f} · perplexity {found.perplexity:,.2f}"))


def embedding_object(texts: Sequence[str], vectors: "np.ndarray") -> dict[str, Any]:
    return {
        "dimensions": vectors.shape[1],
        "embeddings": [
            {"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors, strict=True)
        ],
        "cosines": (vectors @ vectors.T).tolist(),
    }


def print_cosines(console: Console, texts: Sequence[str], vectors: "np.ndarray", pooling: str) -> None:
    """The cosine of each two texts; of many, the nearest other one of each."""
    cosines = vectors @ vectors.T
    if len(texts) == 1:
        numbers = "  ".join(f"{value:+.3f}" for value in vectors[0, :8])
        console.print(Text(f"{numbers}  …"))
    elif len(texts) <= MOST_COSINES:
        table = new_table("cosine", *(str(number) for number in range(1, len(texts) + 1)), last="text")
        for number, (text, row) in enumerate(zip(texts, cosines, strict=True), start=1):
            table.add_row(str(number), *(f"{value:.3f}" for value in row), _shown(text))
        print_table(console, table)
    else:
        table = new_table("text", "nearest", "cosine", last="")
        for number, row in enumerate(cosines):
            order = sorted(range(len(row)), key=lambda column: -row[column])
            nearest = next(column for column in order if column != number)
            table.add_row(str(number + 1), str(nearest + 1), f"{row[nearest]:.3f}", _shown(texts[number]))
        print_table(console, table)
    console.print(Text(f"{plural(len(texts), 'text')}, {vectors.shape[1]} dimensions, pooling {pooling}", QUIET))


def ranking_object(documents: Sequence[str], scores: Sequence[float], by: str) -> list[dict[str, Any]]:
    """Return the ranking, the best first; `index` counts the lines of the file that hold a document, from 0."""
    return [
        {"index": index, "document": documents[index], "score": scores[index]}
        | ({"margin": margin(scores[index])} if by == "answer" else {})
        for index in ranked(scores)
    ]


def print_ranking(console: Console, query: str, documents: Sequence[str], scores: Sequence[float], by: str) -> None:
    console.print(Text(one_line(query), TITLE))
    console.print()
    answers = by == "answer"
    table = new_table("", *(("p(yes)", "margin") if answers else ("cosine",)), last="document")
    for place, index in enumerate(ranked(scores), start=1):
        score = scores[index]
        cells = (f"{score:.3f}", f"{margin(score):+.2f}") if answers else (f"{score:.3f}",)
        table.add_row(str(place), *cells, _shown(documents[index]))
    print_table(console, table)
    if answers:
        console.print(Text('margin: log probability of "yes" less that of "no"', QUIET))


def ranked(scores: Sequence[float]) -> list[int]:
    """Places of the scores, that of the greatest first; of equals the earlier first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def margin(probability: float) -> float:
    """Return how far apart the log probabilities of "yes" and "no" are, from the one's share of both."""
    if not 0 < probability < 1:
        return math.inf if probability else -math.inf
    return math.log(probability) - math.log1p(-probability)


def _shown(text: str) -> Text:
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")
