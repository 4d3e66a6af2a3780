"""The timeline of every request, read from `StepRecord`s: its times, waits, preemptions, forwards and draft cycles.

A sequence computes or it waits: its life is a list of waits, which records open and close, and of the steps that name
it. Every time and cost is that of one of these, and the causes of a wait are what its steps refused.

The engine writes what happens into the `journal` and calls no reader; a timeline reads the journal when it is asked.
The server, the views, replay and the exports read records by the same class, so a recorded run has the timeline that
the run itself had.
"""

import signal
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from forge.reasons import AGING_TOKENS, Deferred, FinishReason, WaitReason
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    DraftCycle,
    EndRecord,
    FinishRecord,
    ItemRecord,
    PreemptRecord,
    RequestMetrics,
    RequestTimes,
    StepRecord,
    WaitRecord,
)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """When a step ran, in seconds on the engine's clock. All sequences of the step share one value."""

    step: int
    started: float
    ended: float
    forward_ms: float


@dataclass(frozen=True)
class Cause:
    """A part of a wait: the steps in which the same kind of reason held."""

    reason: WaitReason
    """The reason in the last of these steps."""
    seq_id: int
    """The sequence that had this reason: the waiting one itself, or the one at the front of the queue before it."""
    num_steps: int
    others_before: bool = False
    """Whether other sequences were at the front before `seq_id` was, in these steps."""

    @classmethod
    def of(cls, refusals: list[WaitRecord]) -> "Cause":
        """Summarize the refusals of these steps, one of each, for reasons of one kind."""
        last, seq_ids = refusals[-1], {refusal.seq_id for refusal in refusals}
        return cls(last.reason, last.seq_id, len(refusals), len(seq_ids) > 1)


@dataclass(frozen=True)
class Wait:
    """A period in the queue, since the arrival or a preemption."""

    first_step: int
    """The first step that left the sequence out."""
    since: float
    """Seconds on the engine's clock."""
    preemption: PreemptRecord | None = None
    """What it waits since; None for an arrival."""
    num_steps: int = 0
    seconds: float = 0.0
    causes: tuple[Cause, ...] = ()
    """The causes in the order in which they last held."""
    ended: bool = False
    """Whether the sequence was admitted. A wait that has not ended counts up to the last step."""
    tokens_recomputed: int = 0
    """Tokens lost to the preemption that were computed again; the others were found in the cache, or never needed."""

    def until(self, step: int, at: float, num_cached: int | None = None) -> "list[Wait]":
        """Return the wait as it is when `step` begins; none if no step left the sequence out. num_cached: the tokens
        that this step's admission found in the cache; None if it does not admit the sequence."""
        num_steps, ended = step - self.first_step, num_cached is not None
        lost = self.preemption.tokens_lost if self.preemption is not None and ended else 0
        recomputed = max(0, lost - (num_cached or 0))
        closed = replace(
            self, num_steps=num_steps, seconds=max(0.0, at - self.since), ended=ended, tokens_recomputed=recomputed
        )
        return [closed] if num_steps > 0 else []


@dataclass
class RequestTimeline(RequestTimes):
    """The history of one sequence of a request (one of its samples) so far. Seconds on the engine's clock."""

    seq_id: int
    entered: int
    """The first step after the sequence was known."""
    request: ArriveRecord | None = None
    """None if the records begin after its arrival; what follows from it is then unknown too."""
    sample: int = 0
    place: int = 0
    """Its request's place in the order of arrival."""
    arrived: float | None = None
    admitted: float | None = None
    """The time when it first began to run."""
    first_token: float | None = None
    """The time when the first output token was known. This and the next two are set when the timeline is asked for."""
    last_token: float | None = None
    num_output_tokens: int = 0
    tokens_cached: int = 0
    """Tokens found in the cache at the first admission."""
    forwards: list[StepSpan] = field(default_factory=list)
    """The steps that it took part in."""
    rows: list[int] = field(default_factory=list)
    """Its rows in each of those steps, draft tokens included."""
    token_steps: list[StepSpan] = field(default_factory=list)
    """The step of each output token."""
    admissions: list[tuple[int, AdmitRecord]] = field(default_factory=list)
    """Each step that admitted it, with the record."""
    waits: list[Wait] = field(default_factory=list)
    cycles: list[DraftCycle] = field(default_factory=list)
    finish: FinishRecord | None = None
    """The record of its end; None if it has not ended."""
    finished_step: int | None = None

    @property
    def request_id(self) -> str | None:
        """The id of its request, where that is known."""
        return None if self.request is None else self.request.request_id

    @property
    def num_prompt_tokens(self) -> int | None:
        """The length of its prompt, where that is known."""
        return None if self.request is None else self.request.num_prompt_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None if it has not."""
        return None if self.finish is None else self.finish.reason

    @property
    def preemptions(self) -> list[Wait]:
        """The waits that a preemption began."""
        return [wait for wait in self.waits if wait.preemption is not None]

    @property
    def times_preempted(self) -> int:
        """The number of its preemptions."""
        return len(self.preemptions)

    @property
    def tokens_computed(self) -> int:
        """The number of rows that went through the model for it."""
        return sum(self.rows)

    @property
    def tokens_recomputed(self) -> int:
        """The number of tokens that were computed before a preemption and again after it."""
        return sum([wait.tokens_recomputed for wait in self.waits])

    @property
    def steps_waited(self) -> int:
        """The number of steps that it spent in the queue, over all its waits."""
        return sum([wait.num_steps for wait in self.waits])

    def token_times(self) -> dict[str, Any]:
        """Compute the fields that follow from `token_steps`."""
        steps = self.token_steps
        first, last = (steps[0].ended, steps[-1].ended) if steps else (None, None)
        return {"first_token": first, "last_token": last, "num_output_tokens": len(steps)}

    def metrics(self) -> RequestMetrics:
        """Return the metrics so far. The arrival must be known."""
        assert self.request is not None, f"no arrival of sequence {self.seq_id}"
        return RequestMetrics(
            num_prompt_tokens=self.request.num_prompt_tokens,
            arrived=self.request.arrived,
            forward_ms=tuple([span.forward_ms for span in self.forwards]),
            forward_tokens=tuple(self.rows),
            admitted=self.admitted,
            times_preempted=self.times_preempted,
            tokens_recomputed=self.tokens_recomputed,
            tokens_cached=self.tokens_cached,
            **self.token_times(),
        )


class Timeline:
    """The timelines of all requests of one engine, read step by step.

    `request`, `metrics` and the queue may be asked for at any time. `forget` drops a sequence, which bounds the memory.
    """

    def __init__(self) -> None:
        self.journal: deque[StepRecord | ArriveRecord | FinishRecord] = deque()
        """Records that the engine wrote and that have not been read: steps, and what happened between them."""
        self._sequences: dict[int, RequestTimeline] = {}
        self._waiting: dict[int, RequestTimeline] = {}
        """Queued sequences. The last wait of each is open."""
        self._running: dict[int, RequestTimeline] = {}
        """Running sequences in the order of admission."""
        self._refused: list[tuple[int, tuple[WaitRecord, ...]]] = []
        """Each step that refused sequences, and which, back to the arrival of the oldest sequence that is known."""
        self._num_arrived, self._step, self._now = 0, 0, 0.0

    # Records in

    def read(self) -> None:
        """Read the journal to its end.

        Ctrl-C takes effect at the end. After another exception in between the next call goes on: an arrival or an end
        is taken in again, which changes nothing; of a step, times and counts may be missing.
        """
        with late_interrupt() if self.journal else nullcontext():
            while self.journal:
                entry = self.journal[0]
                match entry:
                    case ArriveRecord():
                        self._enter(entry, self._step + 1)
                    case FinishRecord():
                        self.end(entry.seq_id, entry.reason)
                self.journal.popleft()
                if isinstance(entry, StepRecord):
                    self.add(replace(entry, arrived=()) if entry.arrived else entry)  # the journal told of arrivals

    def add(self, record: StepRecord) -> None:
        """Take in the next step."""
        for request in record.arrived:
            self._enter(request, record.step)
        for admission in record.admitted:
            sequence = self._begin(self._known(admission.seq_id), record, admission.num_cached)
            sequence.admissions.append((record.step, admission))
        for preemption in record.preempted:
            sequence = self._with_slot(self._known(preemption.seq_id))
            self._queue(sequence, Wait(record.step, record.started, preemption))
        if record.waiting:
            self._refused.append((record.step, record.waiting))
            for refusal in record.waiting:
                if refusal.seq_id not in self._waiting:  # its arrival was not recorded
                    self._queue(self._known(refusal.seq_id), Wait(record.step, record.started))
        running, span = self._running, StepSpan(record.step, record.started, record.ended, record.forward_ms)
        for item in record.items:
            seq_id, _, _, num_tokens, _, num_draft_tokens = item  # by place: there may be thousands
            sequence = running.get(seq_id) or self._begin_unadmitted(item, record)
            sequence.forwards.append(span)
            sequence.rows.append(num_tokens + num_draft_tokens)
        for token in record.tokens:
            (running.get(token.seq_id) or self._begin_sample(token.seq_id, record)).token_steps.append(span)
        self._step, self._now = record.step, record.ended
        for cycle in record.cycles:
            self._known(cycle.seq_id).cycles.append(cycle.in_numbers(record.step))
        for finish in record.finished:
            self._finish(finish)

    def end(self, seq_id: int, reason: FinishReason) -> None:
        """End a sequence between two steps, unless it has ended."""
        if self._known(seq_id).finish is None:
            self._finish(FinishRecord(seq_id, reason))

    def end_requests(self, ends: Iterable[EndRecord]) -> None:
        """End all unfinished sequences of these requests, as a recorded run says of those that ended between steps."""
        sequences = self._sequences.values()
        requests = {sequence.request_id: sequence.request for sequence in sequences if sequence.request is not None}
        for record in ends:
            if request := requests.get(record.request_id):
                for seq_id, reason in zip(request.seq_ids, record.reasons, strict=True):
                    self.end(seq_id, reason)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence, and the refusals that no other one asks for."""
        self.read()
        for sequences in (self._sequences, self._waiting, self._running):
            sequences.pop(seq_id, None)
        if self._refused:
            oldest = next(iter(self._sequences.values()), None)
            del self._refused[: None if oldest is None else self._index_of(oldest.entered)]

    # Timelines out

    def __contains__(self, seq_id: int) -> bool:
        self.read()
        return seq_id in self._sequences

    @property
    def running(self) -> tuple[int, ...]:
        """The sequences that have a place in the batch after the last step, in the order of admission."""
        self.read()
        return tuple(self._running)

    def queue(self, order: str = "fcfs", most: int | None = None) -> tuple[int, ...]:
        """Return the first `most` sequences that wait for a place, in the order in which they will get one. order: the
        name of one of the engine's admission orders."""
        self.read()
        waiting = sorted(self._waiting.values(), key=lambda sequence: _queue_key(sequence, order))
        return tuple([sequence.seq_id for sequence in waiting[:most]])

    def request(self, seq_id: int) -> RequestTimeline:
        """Return a copy of the timeline of one sequence so far. Raises `KeyError` for one that is not known."""
        self.read()
        sequence = self._sequences[seq_id]
        lists: dict[str, Any] = {name: value[:] for name, value in vars(sequence).items() if isinstance(value, list)}
        if seq_id in self._waiting:
            lists["waits"][-1:] = sequence.waits[-1].until(self._step + 1, self._now)
        lists["waits"] = [replace(wait, causes=self._causes(seq_id, wait)) for wait in lists["waits"]]
        return replace(sequence, **sequence.token_times(), **lists)

    def requests(self) -> tuple[RequestTimeline, ...]:
        """Return the timelines of all sequences, in the order of their ids."""
        self.read()
        return tuple(self.request(seq_id) for seq_id in sorted(self._sequences))

    def metrics(self, seq_id: int) -> RequestMetrics:
        """Return the metrics of one sequence so far. Its arrival must be known."""
        self.read()
        return self._sequences[seq_id].metrics()

    # The queue and the batch

    def _known(self, seq_id: int) -> RequestTimeline:
        """Return a sequence. Enters one whose arrival is not in the records."""
        return self._sequences.get(seq_id) or self._sequences.setdefault(seq_id, RequestTimeline(seq_id, self._step))

    def _enter(self, request: ArriveRecord, first_step: int) -> None:
        """Enter a request: its first sample waits in the queue; further ones begin when their prompt has been
        computed."""
        self._num_arrived += 1
        place, arrived = self._num_arrived, request.arrived
        for sample, seq_id in enumerate(request.seq_ids):
            self._sequences[seq_id] = RequestTimeline(seq_id, first_step, request, sample, place, arrived)
        self._queue(self._sequences[request.seq_ids[0]], Wait(first_step, arrived))

    def _queue(self, sequence: RequestTimeline, wait: Wait) -> None:
        """Move a sequence from the batch, if it has a place there, to the queue, and open a wait."""
        self._running.pop(sequence.seq_id, None)
        self._waiting[sequence.seq_id] = sequence
        sequence.waits.append(wait)

    def _leave(self, sequence: RequestTimeline, step: int, at: float, num_cached: int | None = None) -> None:
        """Take a sequence out of the batch, or out of the queue before `step`, which closes its wait."""
        self._running.pop(sequence.seq_id, None)
        if self._waiting.pop(sequence.seq_id, None) is not None:
            sequence.waits[-1:] = sequence.waits[-1].until(step, at, num_cached)

    def _begin(self, sequence: RequestTimeline, record: StepRecord, num_cached: int) -> RequestTimeline:
        """Move a sequence to the batch: it runs from this step on."""
        self._leave(sequence, record.step, record.started, num_cached)
        if sequence.finish is None:
            self._running[sequence.seq_id] = sequence
        if sequence.admitted is None:
            sequence.admitted, sequence.tokens_cached = record.started, num_cached
        return sequence

    def _begin_unadmitted(self, item: ItemRecord, record: StepRecord) -> RequestTimeline:
        """Begin a sequence that computes rows without an `AdmitRecord`: a prefill-only request, which ends in the same
        step, a further sample, or one that ran before the records began."""
        sequence = self._with_slot(self._known(item.seq_id))
        return self._begin(sequence, record, item.start if item.phase == "prefill_only" else 0)

    def _begin_sample(self, seq_id: int, record: StepRecord) -> RequestTimeline:
        """Begin a further sample: it has its first token when the prompt is computed, and waits until it computes."""
        sequence = self._known(seq_id)
        if sequence.admitted is None:
            sequence.admitted = record.started
            self._queue(sequence, Wait(record.step + 1, record.ended))
        return sequence

    def _with_slot(self, sequence: RequestTimeline) -> RequestTimeline:
        """Return a sequence that the step shows running. A sample that waited since its first token has had a slot
        and sat steps out: that was no wait."""
        if sequence.admitted is not None and self._waiting.pop(sequence.seq_id, None) is not None:
            sequence.waits.pop()
        return sequence

    def _finish(self, finish: FinishRecord) -> None:
        sequence = self._known(finish.seq_id)
        self._leave(sequence, self._step + 1, self._now)
        if sequence.finish is None or sequence.finish.reason == finish.reason:  # a step may say more than `end` did
            sequence.finish, sequence.finished_step = finish, self._step

    # Why a sequence waits

    def _index_of(self, step: int) -> int:
        """Return the index of the first refusals at `step` or later."""
        return bisect_left(self._refused, step, key=lambda refused: refused[0])

    def _causes(self, seq_id: int, wait: Wait) -> tuple[Cause, ...]:
        """Group a wait's steps by the kind of reason: the sequence's own, else that of the queue's front. A deferred
        sequence lets others pass, so it is never the front that they wait for."""
        groups: dict[tuple[type, bool], list[WaitRecord]] = {}
        first, end = self._index_of(wait.first_step), self._index_of(wait.first_step + wait.num_steps)
        for _, refused in self._refused[first:end]:
            front = next((record for record in refused if not isinstance(record.reason, Deferred)), None)
            record = next((record for record in refused if record.seq_id == seq_id), front)
            if record is not None:
                kind = type(record.reason), record.seq_id == seq_id
                group = groups[kind] = groups.pop(kind, [])  # the kind that held last comes last
                group.append(record)
        return tuple([Cause.of(group) for group in groups.values()])


def _queue_key(sequence: RequestTimeline, order: str) -> tuple[int, float, int]:
    request = sequence.request
    if request is None:
        return 0, -1.0, sequence.seq_id  # it came before the records began
    tokens = request.num_prompt_tokens + request.max_output_tokens
    keys = {"priority": request.priority, "sjf": tokens, "sjf-aged": tokens + AGING_TOKENS * sequence.place}
    return keys.get(order, 0), request.arrived, sequence.seq_id


def timeline_of(steps: Iterable[StepRecord], ends: Iterable[EndRecord] = ()) -> Timeline:
    """Build the timeline of a whole run."""
    timeline = Timeline()
    for step in steps:
        timeline.add(step)
    timeline.end_requests(ends)
    return timeline


@contextmanager
def late_interrupt() -> Iterator[None]:
    """Handle SIGINT at the end of the block. It comes to the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[tuple[int, FrameType | None]] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: signals.append((number, frame)))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[0])
