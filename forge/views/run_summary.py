"""What a run of many requests came to: the closing table, the charts over its whole time, and the longest waits; and
one request's story: what happened to it, step by step, when, and why. Drawn from records alone.

`forge trace-scheduler` and `forge replay` end with the first, `forge replay --seq` shows the second; `serving_object`
and `request_object` are the same for programs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from forge.errors import UsageError
from forge.trace.explain import (
    class_name,
    explain_admission,
    explain_finish,
    explain_preempted,
    explain_request,
    explain_wait,
)
from forge.trace.records import StepRecord
from forge.trace.timeline import RequestTimeline
from forge.trace.totals import STARVED, Percentiles, Totals, totals_of
from forge.views.charts import sparkline, throughput_plot
from forge.views.formatting import NOTHING, count, formatted, ms, percent, plural, rate
from forge.views.history import History
from forge.views.json_output import as_object, cycles_object, picked, speculation_object
from forge.views.metrics import draft_facts, flowing
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.scheduler import chart_series, finish_text
from forge.views.screen import Part, Report, Table, labelled, question, report, title
from forge.views.summary import RunLabel
from forge.views.text import one_line, quoted

_MOST_TOLD = 3
"""Waits and preemptions that are explained."""
_CHART_WIDTH = 60
_WIDE = 64
"""Columns from which the table of times has room for whole names."""
_TIMES = {
    "queue": ("queue time", "queue"),
    "first_token": ("time to first token", "TTFT"),
    "per_token": ("time per output token", "TPOT"),
    "end_to_end": ("end to end", "E2E"),
}
"""The times of `Totals`, each with its name on a wide screen and on a narrow one."""


def serving_object(
    label: RunLabel, records: Sequence[StepRecord], requests: Sequence[RequestTimeline]
) -> dict[str, Any]:
    """Return a run for `--json`: totals, every sequence's timeline with its `why` lines, and every step in short."""
    totals = totals_of(records, requests) if records else None
    return {
        **as_object(label),
        "totals": None if totals is None else totals_object(totals),
        "sequences": [request_object(request) for request in requests],
        **speculation_object(records),
        "steps": [step_object(record) for record in records],
    }


def totals_object(totals: Totals) -> dict[str, Any]:
    facts = as_object(totals, "tokens_per_second", "recomputed_share")
    for name in ("utilization", "fragmentation", "sharing", "batch"):
        mean, most = facts.pop(name)
        facts |= {f"{name}_mean": mean, f"{name}_max": most}
    for name in _TIMES:
        facts[f"{name}_ms"] = facts.pop(name)
    return facts


def request_object(request: RequestTimeline) -> dict[str, Any]:
    """Return one sequence for `--json`."""
    finish = request.finish
    return {
        **picked(request, "seq_id", "request_id", "sample", "num_prompt_tokens", "num_output_tokens", "finish_reason"),
        "finish": None if finish is None else explain_finish(finish),
        **picked(request, "queue_ms", "time_to_first_token_ms", "time_per_output_token_ms", "end_to_end_ms"),
        **picked(request, "steps_waited", "times_preempted", "tokens_computed", "tokens_recomputed", "tokens_cached"),
        "why": list(explain_request(request)),
    }


def step_object(record: StepRecord) -> dict[str, Any]:
    """Return a step in short; a trace has all of it."""
    return {
        "step": record.step,
        "class": record.execution_class,
        "sequences": len(record.items),
        **picked(record, "tokens_computed", "schedule_ms", "forward_ms", "sample_ms"),
        **as_object(record.queues),
        **picked(record.cache, "used_blocks", "num_blocks"),
        "fragmentation": record.cache.internal_fragmentation,
        "sharing": record.cache.sharing,
        "admitted": [admission.seq_id for admission in record.admitted],
        "preempted": [victim.seq_id for victim in record.preempted],
        "finished": [finish.seq_id for finish in record.finished],
        **cycles_object(record),
    }


def serving_screen(history: History, requests: Sequence[RequestTimeline], note: str = "") -> Iterator[Part]:
    """Draw the closing table of a run, its charts, and the longest waits with their reasons."""
    if not history.records:
        yield Text("No step ran.")
        return
    totals = totals_of(history.records, requests)
    yield from question("What did the run come to?", f"{history.label}{note}")
    yield lambda width: flowing(total_facts(totals, history.records), width)
    yield from (None, lambda width: [times_table(totals, width)], None)
    yield lambda width: charts_over_time(history, width)
    yield from _reasons(requests)


Tenants = Sequence[tuple[int, Sequence[RequestTimeline]]]
"""For each tenant: its draft tokens per cycle at most, and its requests."""


def tenant_objects(tenants: Tenants) -> list[dict[str, Any]]:
    """Return each tenant's acceptance and time per token."""
    facts = []
    for limit, requests in tenants:
        cycles = [cycle for request in requests for cycle in request.cycles]
        proposed = sum(cycle.num_proposed for cycle in cycles)
        accepted = sum(cycle.num_accepted for cycle in cycles)
        per_token = Percentiles.of([request.time_per_output_token_ms for request in requests])
        facts.append(
            {
                "num_speculative_tokens": limit,
                "requests": len(requests),
                "proposed": proposed,
                "accepted": accepted,
                "acceptance": accepted / proposed if proposed else None,
                "time_per_output_token_ms": per_token and per_token.p50,
            }
        )
    return facts


def tenants_screen(tenants: Tenants) -> Iterator[Part]:
    """Draw a row per tenant; nothing if there are no tenants."""
    if tenants:
        columns = ["--k: {num_speculative_tokens:count}", "requests: {requests:count}", "drafted: {proposed:count}"]
        columns += [
            "accepted: {accepted:count}",
            ": {acceptance:percent}",
            "ms per token: {time_per_output_token_ms:ms}",
        ]
        yield from (None, title("Each tenant's draft tokens"), Table.of(tenant_objects(tenants), *columns, names=0))


def total_facts(totals: Totals, records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return name and figure, in the order in which a reader asks."""
    classes = ", ".join(f"{class_name(name)} {count(number)}" for name, number in sorted(totals.steps_by_class.items()))
    ended = ", ".join(f"{name} {count(number)}" for name, number in sorted(totals.ended.items()))
    facts = [
        ("steps", f"{count(totals.num_steps)} ({classes})"),
        ("seconds", f"{totals.seconds:.2f}"),
        ("throughput", formatted(totals.tokens_per_second, "rate tok/s")),
        ("output tokens", count(totals.output_tokens)),
        ("tokens computed", count(totals.tokens_computed)),
        ("batch", f"{totals.batch[0]:.1f} on average, {totals.batch[1]} at most"),
        ("ended", ended or NOTHING),
        ("preemptions", preemptions_text(totals)),
        ("pool used", f"{percent(totals.utilization[0])} on average, {percent(totals.utilization[1])} at most"),
        ("fragmentation", f"{percent(totals.fragmentation[0])} on average"),
        ("shared", f"{percent(totals.sharing[0])} on average, {percent(totals.sharing[1])} at most"),
    ]
    if totals.most_overtaken:
        facts.append(("overtaken", overtaken_text(totals)))
    if totals.tokens_cached:
        facts.append(("from cache", plural(totals.tokens_cached, "token")))
    if totals.pool_exhausted:
        facts.append(("ended by the pool's size", plural(totals.pool_exhausted, "sequence")))
    if totals.rejected:
        facts.append(("refused", plural(totals.rejected, "request")))
    return facts + draft_facts(records)


def overtaken_text(totals: Totals) -> str:
    """Format how many were overtaken: `7 of 60 requests by more than 8 later ones (12 %), one by 31; longest wait 188
    steps`."""
    requests = sum(totals.ended.values())
    many = f"{totals.starved} of {plural(requests, 'request')} by more than {STARVED} later ones"
    share = percent(totals.starved / requests) if requests else NOTHING
    return f"{many} ({share}), at most by {totals.most_overtaken}; longest wait {plural(totals.longest_wait, 'step')}"


def preemptions_text(totals: Totals) -> str:
    """Format preemptions: `35 of 30 sequences, 1,203 tokens computed again (3 % of all)`."""
    if not totals.preemptions:
        return "0"
    text = f"{count(totals.preemptions)} of {plural(totals.sequences_preempted, 'sequence')}"
    if totals.swaps:
        text += f", {count(totals.swaps)} swapped"
    return f"{text}, {plural(totals.tokens_recomputed, 'token')} computed again ({percent(totals.recomputed_share)})"


def times_table(totals: Totals, width: int) -> Table:
    """Build a table of percentiles of the requests' times; on a narrow screen with short names."""
    narrow = width < _WIDE
    heading, room = ("ms", 5) if narrow else ("milliseconds", 8)
    columns = (f"{f'p{share}':>{room}}: {{times.p{share}:ms}}" for share in (50, 90, 99))
    rows = [{"name": names[narrow], "times": getattr(totals, time)} for time, names in _TIMES.items()]
    return Table.of(rows, f"{heading}: {{name}}", *columns, f"{'max':>{room}}: {{times.maximum:ms}}", styles={0: QUIET})


def charts_over_time(history: History, width: int) -> list[Text]:
    """Return one strip per figure over the whole run, with the value that its upper edge stands for."""
    lines = []
    ends = {"tok/s": rate, "pool": percent, "queue": lambda value: count(round(value)), "frag": percent}
    names = {"frag": "fragmentation"}
    for name, values, scale in chart_series(history, len(history) - 1, len(history)):
        strip = sparkline(values, scale, max(8, min(_CHART_WIDTH, width - 26)))
        label, end = (f"{names.get(name, name):<14}", QUIET), (f"  to {ends[name](scale)}", QUIET)
        lines.append(Text.assemble(label, (strip, ACCENT), end))
    return lines


def throughput_screen(records: Sequence[StepRecord]) -> Iterator[Part]:
    """Draw the throughput over the time of a run, from the moments of its tokens."""
    if records:
        began, seconds = records[0].started, records[-1].ended - records[0].started
        times = [record.ended - began for record in records for _ in record.tokens]
        yield from (None, title("Throughput over time"), lambda width: throughput_plot(times, seconds, width, ACCENT))


def _reasons(requests: Sequence[RequestTimeline]) -> Iterator[Part]:
    """Draw which sequences waited longest and which was preempted most, and why."""
    waited = [(wait.seconds, request.seq_id, wait) for request in requests for wait in request.waits]
    waited.sort(key=lambda waiting: (-waiting[0], waiting[1]))
    yield from _told("The longest waits", [(seq_id, explain_wait(wait, seq_id)) for _, seq_id, wait in waited])
    victim = max(requests, key=lambda request: request.times_preempted, default=None)
    if victim is not None:
        told = [(victim.seq_id, explain_preempted(preemption)) for preemption in victim.preemptions]
        yield from _told("Preempted most often", told)


def _told(heading: str, told: Sequence[tuple[int, str]]) -> Iterator[Part]:
    if told:
        rows = [(Text(f"seq {seq_id}", sequence_style(seq_id)), one_line(line)) for seq_id, line in told]
        yield from (None, title(heading), labelled(rows[:_MOST_TOLD]))


_PARTS = {"plan": "schedule_ms", "forward": "forward_ms", "choose": "sample_ms"}


def costs(history: History) -> Report:
    """Where the time of the steps went, by what they computed: planning, forward pass, choosing tokens, the rest."""
    classes = []
    for phase in dict.fromkeys(record.execution_class for record in history.records):
        steps = [record for record in history.records if record.execution_class == phase]
        whole = sum(record.ended - record.started for record in steps) * 1e3 / len(steps)
        parts = {name: sum(getattr(record, field) for record in steps) / len(steps) for name, field in _PARTS.items()}
        rest = {"rest": whole - sum(parts.values()), "whole": whole}
        classes.append({"class": phase, "steps": len(steps), "milliseconds": parts | rest})
    return report({"classes": classes}, lambda: _costs_screen(classes, str(history.label)))


def _costs_screen(classes: list[dict[str, Any]], label: str) -> Iterator[Part]:
    yield from question("Where did the time of the steps go?", f"{label}, milliseconds per step")
    columns = (f"{name}: {{milliseconds.{name}:ms}}" for name in (*_PARTS, "rest", "whole"))
    yield Table.of(classes, "class: {class}", "steps: {steps:count}", *columns)


VIEWS: dict[str, Callable[[History], Report]] = {"costs": costs}
"""Name → the view that `forge replay FILE --view NAME` shows; its docstring says what that is."""


def view_report(name: str, history: History) -> Report:
    """Return the view of that name. Raises `UsageError` for an unknown name, with a list of the known ones."""
    if name not in VIEWS:
        unknown = UsageError(f"unknown view {name!r}; there are {', '.join(VIEWS)}")
        for known, view in VIEWS.items():
            unknown.add_note(f"  {known:12}{view.__doc__}")
        raise unknown
    return VIEWS[name](history)


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
