"""A run as a chapter shows it."""

from collections.abc import Iterator, Sequence

from forge.views.forwards import Note, chart_rows, chart_scale, spaced
from forge.views.generation import sample_texts
from forge.views.metrics import chart_heading, metrics_lines
from forge.views.screen import Part, sentences
from forge.views.summary import RunResult

RUN_ROWS = 12


def run_parts(
    result: RunResult, prompt: str, texts: Sequence[str], *about: str, note: Note | None = None
) -> Iterator[Part]:
    """Yield the text, its forwards at even distances, what that shows, the figures. note: beside a forward."""
    shown = spaced(result.forwards, RUN_ROWS)
    yield from sample_texts(result, prompt, quiet_prompt=True)
    yield None
    yield lambda width: [chart_heading(result.label, width), *chart_rows(shown, chart_scale(shown), width, note)]
    yield from (None, *sentences(texts), *about, None)
    yield lambda width: metrics_lines(result, width)
