"""A trace as a file that Perfetto (ui.perfetto.dev) and Chrome's own viewer open: the Trace Event Format, as JSON.

One process is the engine: a track of its steps with their parts, and counters of blocks and queues. The other has a
track per sequence: when it waited and for what, what it computed, when it was preempted.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from forge.trace.explain import class_name, explain_admission, explain_finish, explain_preempted, explain_wait
from forge.trace.recorder import Trace
from forge.trace.records import StepRecord
from forge.trace.timeline import RequestTimeline, timeline_of

ENGINE, SEQUENCES = 1, 2
"""Process ids."""
STEPS = 1
"""The thread id of the steps' track; a sequence's is one more than its own id, because 0 means something else."""
Event = dict[str, Any]
_PREEMPTION_FACTS = ("victim_of", "needed", "free", "preempt", "preemption", "tokens_lost")


def perfetto_object(trace: Trace) -> dict[str, Any]:
    """Build the whole file. Times are microseconds from the run's first arrival or step."""
    requests = timeline_of(trace.steps, trace.ends).requests()
    origin = min(
        [step.started for step in trace.steps]
        + [request.arrived for request in requests if request.arrived is not None],
        default=0.0,
    )
    events = [*_names(trace, requests)]
    for step in trace.steps:
        events += _step_events(step, origin)
        events += _sequence_events(step, origin)
    for request in requests:
        events += _request_events(request, origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": trace.header.model, "kv": trace.header.kv, "forge": trace.header.forge},
    }


def _names(trace: Trace, requests: Sequence[RequestTimeline]) -> Iterator[Event]:
    header = trace.header
    yield _meta("process_name", ENGINE, STEPS, name=f"engine · {header.model} · kv {header.kv} · {header.device}")
    yield _meta("process_sort_index", ENGINE, STEPS, sort_index=0)
    yield _meta("thread_name", ENGINE, STEPS, name="steps")
    yield _meta("process_name", SEQUENCES, STEPS, name="sequences")
    yield _meta("process_sort_index", SEQUENCES, STEPS, sort_index=1)
    for request in requests:
        yield _meta("thread_name", SEQUENCES, request.seq_id + 1, name=f"seq {request.seq_id}")
        yield _meta("thread_sort_index", SEQUENCES, request.seq_id + 1, sort_index=request.seq_id)


def _step_events(step: StepRecord, origin: float) -> Iterator[Event]:
    start = _us(step.started, origin)
    rows = {"step": step.step, "rows": step.tokens_computed, "sequences": len(step.items)}
    yield _slice(ENGINE, STEPS, class_name(step.execution_class), start, (step.ended - step.started) * 1e6, **rows)
    end = _us(step.ended, origin)
    for name, ms in (("schedule", step.schedule_ms), ("forward", step.forward_ms), ("sample", step.sample_ms)):
        duration = min(ms * 1e3, end - start)  # the parts lie within the step, whatever was rounded
        yield _slice(ENGINE, STEPS, name, start, duration)
        start += duration
    cache, queues = step.cache, step.queues
    yield _counter("blocks", end, used=cache.used_blocks, cached=cache.cached_blocks, free=cache.free_blocks)
    yield _counter("queues", end, waiting=queues.waiting, running=queues.running, swapped=queues.swapped)
    yield _counter("rows", end, rows=step.tokens_computed)


def _sequence_events(step: StepRecord, origin: float) -> Iterator[Event]:
    """Yield an event for each sequence of a step."""
    start, duration = _us(step.started, origin), (step.ended - step.started) * 1e6
    texts = {token.seq_id: token.text for token in step.tokens}
    for item in step.items:
        phase = class_name(item.phase)
        name = phase if item.num_tokens == 1 else f"{phase} {item.start}:{item.start + item.num_tokens}"
        facts = {"step": step.step, "start": item.start, "rows": item.num_tokens, "remaining": item.remaining}
        yield _slice(SEQUENCES, item.seq_id + 1, name, start, duration, **facts, text=texts.get(item.seq_id, ""))
    for admission in step.admitted:
        numbers = {"how": admission.how, "from_cache": admission.num_cached, "blocks": admission.num_blocks}
        yield _instant(admission.seq_id, "admitted", start, **numbers, why=explain_admission(admission))
    for finish in step.finished:
        yield _instant(finish.seq_id, f"finished: {finish.reason}", start + duration, why=explain_finish(finish))


def _request_events(request: RequestTimeline, origin: float) -> Iterator[Event]:
    """Yield a request's waits and preemptions, with the cost that is known only afterwards."""
    for wait in request.waits:
        begun = _us(wait.since, origin)
        kind = type(wait.causes[-1].reason).__name__ if wait.causes else "queue"
        why = explain_wait(wait, request.seq_id)
        yield _slice(SEQUENCES, request.seq_id + 1, f"waits: {kind}", begun, wait.seconds * 1e6, why=why)
        if wait.preemption is not None:
            facts = {name: getattr(wait.preemption, name) for name in _PREEMPTION_FACTS}
            yield _instant(request.seq_id, "preempted", begun, **facts, why=explain_preempted(wait))


def _us(seconds: float, origin: float) -> float:
    return (seconds - origin) * 1e6


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, name: str, start: float, duration: float, /, **args: Any) -> Event:
    event = {"ph": "X", "name": name, "cat": "forge", "pid": pid, "tid": tid, "ts": start, "dur": max(0.0, duration)}
    return event | ({"args": args} if args else {})


def _counter(name: str, at: float, /, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": STEPS, "ts": at, "args": values}


def _instant(seq_id: int, name: str, at: float, /, **args: Any) -> Event:
    track = {"pid": SEQUENCES, "tid": seq_id + 1}
    return {"ph": "i", "s": "t", "name": name, "cat": "forge", **track, "ts": at, "args": args}
