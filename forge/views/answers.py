"""The screens of answers that one forward pass gives: labels, scores, cosines, rankings; and the same for `--json`.

Log probabilities are tables: for each token how likely it was, and what else could have stood there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.engine.outputs import RequestOutput
from forge.engine.task import Logprobs
from forge.engine.tasks import Classification, Score
from forge.views.formatting import NOTHING, plural
from forge.views.json_output import picked
from forge.views.palette import ACCENT, QUIET
from forge.views.screen import Part, Table, title
from forge.views.text import one_line, quoted

if TYPE_CHECKING:
    import numpy as np

TokenText = Callable[[int], str]
Rows = list[Sequence[str | Text]]


def _token_table(
    what: str, rows: Iterable[tuple[int, Logprobs | None]], alternatives: int, token_text: TokenText
) -> Table:
    """Build a table of tokens, each with its log probability; None for a token that nothing precedes."""
    cells: list[list[str | Text]] = []
    for token_id, entry in rows:
        logprob = None if entry is None else dict(entry).get(token_id)
        own = [NOTHING] * 2 if logprob is None else [f"{logprob:.3f}", f"{math.exp(logprob):.3f}"]
        cells.append([quoted(token_text(token_id)), *own])
        if alternatives:
            rivals = (
                Text.assemble(quoted(token_text(rival)), (f" {math.exp(value):.3f}", QUIET))
                for rival, value in (entry or ())[:alternatives]
            )
            cells[-1].append(Text("   ").join(rivals))
    headings = (what, "logprob", "p", "likeliest there") if alternatives else (what, "logprob", "p")
    return Table(headings, cells, lefts=(3,), wraps=bool(alternatives))


def score_table(found: Score, alternatives: int, token_text: TokenText) -> Table:
    """Build a table of each scored token, given all before it."""
    scored = zip(found.token_ids, found.logprobs, found.alternatives, strict=True)
    rows = (
        (token_id, tuple(rivals) if token_id in dict(rivals) else (*rivals, (token_id, logprob)))
        for token_id, logprob, rivals in scored
    )
    return _token_table("token", rows, alternatives, token_text)


def logprobs_screen(
    output: RequestOutput, logprobs: int | None, prompt_logprobs: int | None, token_text: TokenText
) -> Iterator[Part]:
    """Yield the tables that were asked for: that of the prompt first, then one per sample."""
    if prompt_logprobs is not None and output.prompt_logprobs is not None:
        rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        yield from (None, _token_table("prompt token", rows, prompt_logprobs, token_text))
    for sample in output.outputs if logprobs is not None else ():
        name = f"sample {sample.index}" if len(output.outputs) > 1 else "output token"
        drawn = zip(sample.token_ids, sample.logprobs or (), strict=True)
        yield from (None, _token_table(name, drawn, logprobs or 0, token_text))


MOST_COSINES = 12
"""Texts up to which each pair's cosine is shown; of more texts, only the nearest of each."""


def classification_object(texts: Sequence[str], found: Sequence[Classification]) -> list[dict[str, Any]]:
    return [
        {"text": text, **picked(classification, "label", "probabilities", "logprobs")}
        | ({} if classification.score is None else {"score": classification.score})
        for text, classification in zip(texts, found, strict=True)
    ]


def classification_screen(texts: Sequence[str], found: Sequence[Classification]) -> Iterator[Part]:
    """Draw a text: each label with its probability, the likeliest first. Several: a line for each."""
    names = list(found[0].probabilities)
    if len(found) == 1:
        (classification,) = found
        labels: Rows = [
            (
                Text(one_line(name), ACCENT if name == classification.label else ""),
                f"{probability:.3f}",
                f"{classification.logprobs[name]:.3f}",
            )
            for name, probability in sorted(classification.probabilities.items(), key=lambda item: -item[1])
        ]
        yield Table(("label", "probability", "logprob"), labels)
        yield "probability: among the labels; logprob: among all that could come next"
        return
    rows: Rows = [
        (Text(one_line(answer.label), ACCENT), *(f"{answer.probabilities[name]:.3f}" for name in names), one_line(text))
        for text, answer in zip(texts, found, strict=True)
    ]
    last = len(names) + 1
    yield Table(("label", *map(one_line, names), "text"), rows, lefts=(last,), cut=(last,))
    counts = ", ".join(f"{one_line(name)} {sum(answer.label == name for answer in found)}" for name in names)
    yield f"{plural(len(found), 'text')}: {counts}"


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


def score_screen(prompt: str, found: Score, top: int, token_text: TokenText) -> Iterator[Part]:
    if prompt:
        yield one_line(prompt)
    yield from (score_table(found, top, token_text), None)
    tokens = plural(len(found.token_ids), "token")
    yield Text(f"{tokens} · total {found.total:.3f} · perplexity {found.perplexity:,.2f}")


def embedding_object(texts: Sequence[str], vectors: "np.ndarray") -> dict[str, Any]:
    return {
        "dimensions": vectors.shape[1],
        "embeddings": [
            {"text": text, "embedding": vector.tolist()} for text, vector in zip(texts, vectors, strict=True)
        ],
        "cosines": (vectors @ vectors.T).tolist(),
    }


def cosines_screen(texts: Sequence[str], vectors: "np.ndarray", pooling: str) -> Iterator[Part]:
    """Draw the cosine of each two texts; of many, the nearest other one of each."""
    cosines, count = vectors @ vectors.T, len(texts)
    if count == 1:
        numbers = "  ".join(f"{value:+.3f}" for value in vectors[0, :8])
        yield Text(f"{numbers}  …")
    elif count <= MOST_COSINES:
        headings = ("cosine", *map(str, range(1, count + 1)), "text")
        rows: Rows = [
            (str(number), *(f"{value:.3f}" for value in row), one_line(text))
            for number, (text, row) in enumerate(zip(texts, cosines, strict=True), start=1)
        ]
        yield Table(headings, rows, lefts=(count + 1,), cut=(count + 1,))
    else:
        nearest = [
            max((rival for rival in range(count) if rival != number), key=row.__getitem__)
            for number, row in enumerate(cosines)
        ]
        rows = [
            (str(number + 1), str(rival + 1), f"{cosines[number, rival]:.3f}", one_line(texts[number]))
            for number, rival in enumerate(nearest)
        ]
        yield Table(("text", "nearest", "cosine", ""), rows, lefts=(3,), cut=(3,))
    yield f"{plural(count, 'text')}, {vectors.shape[1]} dimensions, pooling {pooling}"


def ranking_object(documents: Sequence[str], scores: Sequence[float], by: str) -> list[dict[str, Any]]:
    """Return the ranking, the best first; `index` counts the lines of the file that hold a document, from 0."""
    return [
        {"index": index, "document": documents[index], "score": scores[index]}
        | ({"margin": margin(scores[index])} if by == "answer" else {})
        for index in ranked(scores)
    ]


def ranking_screen(query: str, documents: Sequence[str], scores: Sequence[float], by: str) -> Iterator[Part]:
    yield from (title(one_line(query)), None)
    answers = by == "answer"
    rows = [{"place": place, **row} for place, row in enumerate(ranking_object(documents, scores, by), start=1)]
    figures = ("p(yes): {score:.3f}", "margin: {margin:+.2f}") if answers else ("cosine: {score:.3f}",)
    last = len(figures) + 1
    yield Table.of(rows, ": {place}", *figures, "document: {document:line}", lefts=(last,), cut=(last,))
    if answers:
        yield 'margin: log probability of "yes" less that of "no"'


def ranked(scores: Sequence[float]) -> list[int]:
    """Return the scores' indices, the greatest score first; of equal ones the earlier first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def margin(probability: float) -> float:
    """Return how far apart the log probabilities of "yes" and "no" are, from the one's share of both."""
    if not 0 < probability < 1:
        return math.inf if probability else -math.inf
    return math.log(probability) - math.log1p(-probability)
