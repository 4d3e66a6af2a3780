"""Log-probabilities as tables: for each token how likely it was, and what else could have stood there."""

from collections.abc import Callable, Iterable, Sequence
from math import exp

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.task import Logprobs
from forge.engine.tasks import Score
from forge.views.palette import QUIET
from forge.views.terminal import new_table, print_table
from forge.views.text import quoted

TokenText = Callable[[int], str]


def output_table(
    sample: CompletionOutput, alternatives: int, token_text: TokenText, title: str = "output token"
) -> Table:
    """Each output token of `sample`. Expects `sample.logprobs`."""
    return _table(title, zip(sample.token_ids, sample.logprobs or (), strict=True), alternatives, token_text)


def prompt_table(output: RequestOutput, alternatives: int, token_text: TokenText) -> Table:
    """Each prompt token; the first has no probability, for nothing precedes it. Expects `output.prompt_logprobs`."""
    rows = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return _table("prompt token", rows, alternatives, token_text)


def score_table(found: Score, alternatives: int, token_text: TokenText) -> Table:
    """Each scored token, given all before it."""
    own = ((token_id, logprob) for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True))
    rows = [
        (one[0], tuple(others) if one[0] in dict(others) else (*others, one))
        for one, others in zip(own, found.alternatives, strict=True)
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
