"""One request's story: what happened to it, step by step, when, and why. Drawn from records alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from forge.errors import UsageError
from forge.trace.explain import class_name, explain_admission, explain_preempted, explain_wait
from forge.trace.records import StepRecord
from forge.trace.timeline import RequestTimeline
from forge.views.formatting import NOTHING, count, ms, plural
from forge.views.palette import QUIET, TITLE, sequence_style
from forge.views.scheduler import finish_text
from forge.views.screen import Part, Table
from forge.views.text import one_line, quoted

QUESTION = "What happened to this request?"
_ORDER = ("arrives", "preempted", "waits", "admitted", "computes", "ends")
"""The order of events within a step."""


@dataclass(frozen=True)
class Event:
    """A line of the story."""

    step: int
    """The first that it is about; 0 for the arrival."""
    last_step: int
    seconds: float
    """Its time on the engine's clock."""
    kind: str
    """One of `_ORDER`."""
    text: str

    @property
    def steps(self) -> str:
        """`3 to 7`; nothing for the arrival."""
        span = f"{self.step} to {self.last_step}" if self.last_step > self.step else str(self.step)
        return span if self.step else ""


def request_of(requests: Sequence[RequestTimeline], seq_id: int) -> RequestTimeline:
    """Return the timeline of a sequence. Raises `UsageError` if the run had none of that number."""
    matching = [timeline for timeline in requests if timeline.seq_id == seq_id]
    if not requests:
        raise UsageError("the run has no requests")
    if not matching:
        first, last = min(timeline.seq_id for timeline in requests), max(timeline.seq_id for timeline in requests)
        raise UsageError(f"the run has no seq {seq_id}; there are {first} to {last}")
    return matching[0]


def story_of(request: RequestTimeline, records: Sequence[StepRecord]) -> list[Event]:
    """List everything that happened to a sequence, in order."""
    began = {record.step: record.started for record in records}
    ended = {record.step: record.ended for record in records}
    events = [*_computed(request.seq_id, records)]
    if request.arrived is not None:
        tokens = "" if request.num_prompt_tokens is None else f" with {plural(request.num_prompt_tokens, 'token')}"
        events.append(Event(0, 0, request.arrived, "arrives", f"a prompt{tokens}"))
    for wait in request.waits:
        first, last, seconds = wait.first_step, wait.first_step + wait.num_steps - 1, began.get(wait.first_step, 0.0)
        if wait.preemption is not None:
            events.append(Event(first, first, seconds, "preempted", explain_preempted(wait).partition(", ")[2]))
        events.append(Event(first, last, seconds, "waits", explain_wait(wait, request.seq_id)))
    for step, admission in request.admissions:
        events.append(Event(step, step, began.get(step, 0.0), "admitted", explain_admission(admission)))
    if request.finish is not None and request.finished_step is not None:
        step = request.finished_step
        events.append(Event(step, step, ended.get(step, 0.0), "ends", finish_text(request.finish)))
    return sorted(events, key=lambda event: (event.step, _ORDER.index(event.kind)))


def _computed(seq_id: int, records: Sequence[StepRecord]) -> Iterator[Event]:
    """Yield what the sequence computed: a line for each run of consecutive steps of one kind."""
    rows = [(record, item) for record in records for item in record.items if item.seq_id == seq_id]
    numbered = [(record.step - index, record, item) for index, (record, item) in enumerate(rows)]
    for (phase, _), group in groupby(numbered, key=lambda row: (row[2].phase, row[0])):
        steps = list(group)
        first, last = steps[0][2], steps[-1][2]
        tokens = [token for _, record, _ in steps for token in record.tokens if token.seq_id == seq_id]
        span = f"[{first.start}:{last.start + last.num_tokens}]"
        output = f"  {quoted(''.join(token.text for token in tokens))}" if tokens else ""
        text = f"{class_name(phase)} {span}{output}"
        yield Event(steps[0][1].step, steps[-1][1].step, steps[0][1].started, "computes", text)


def story_screen(request: RequestTimeline, records: Sequence[StepRecord]) -> Iterator[Part]:
    """Draw a line for each event, and what the request came to."""
    who = Text.assemble((QUESTION, TITLE), (f"  seq {request.seq_id}", sequence_style(request.seq_id)))
    if request.request_id is not None:
        who.append(f" · request {one_line(request.request_id)}", QUIET)
    yield from (who, None)
    events = story_of(request, records)
    rows = [(ms((event.seconds - events[0].seconds) * 1e3), event.steps, event.kind, event.text) for event in events]
    yield Table(("ms", "steps", "", ""), rows, names=0, lefts=(1, 2, 3), styles={2: TITLE}, wraps=(3,))
    again = f", {count(request.tokens_recomputed)} of them for a second time" if request.tokens_recomputed else ""
    cached = f"; {plural(request.tokens_cached, 'token')} came from the cache" if request.tokens_cached else ""
    preempted = f"was preempted {plural(request.times_preempted, 'time')}"
    yield None
    yield Text(
        f"The first token came {_after(request.time_to_first_token_ms)}, the last {_after(request.end_to_end_ms)}. "
        f"It waited {plural(request.steps_waited, 'step')}, {preempted}, and took "
        f"{plural(request.tokens_computed, 'row')}{again}{cached}."
    )


def _after(milliseconds: float | None) -> str:
    return NOTHING if milliseconds is None else f"after {ms(milliseconds)} ms"
