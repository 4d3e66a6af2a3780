"""The timeline of every request: its times, waits, preemptions, forwards and draft cycles, read from `StepRecord`s.

The engine writes what happens into the `journal` and calls no reader; a timeline reads the journal when it is asked.
The server, the views, replay and the exports read records by the same class, so a recorded run has the timeline that
the run itself had.

Why did a sequence wait? One tally for the whole queue counts the steps in which its front waited for each kind of
reason. A wait notes the tally when it begins, and advances its note in steps in which the sequence had a reason of its
own; the difference at the end is what it waited for behind others.
"""

import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Literal

from forge.reasons import AGING_TOKENS, Deferred, FinishReason, WaitReason
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    CachedPositions,
    EndRecord,
    FinishRecord,
    PreemptRecord,
    RequestMetrics,
    RequestTimes,
    SpecCycle,
    StepRecord,
    WaitRecord,
)

QueuedAfter = Literal["arrival", "preemption"]


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
    """As of the last of these steps."""
    seq_id: int
    """The sequence that had this reason: the waiting one itself, or the one at the front of the queue before it."""
    num_steps: int
    others_before: bool = False
    """Whether other sequences were at the front before `seq_id` was, in these steps."""


@dataclass(frozen=True)
class Wait:
    """A period in the queue."""

    after: QueuedAfter
    first_step: int
    """The first step that left the sequence out."""
    num_steps: int
    seconds: float
    causes: tuple[Cause, ...]
    """In the order in which they last held."""
    ended: bool = True
    """Whether the sequence was admitted. A wait that has not ended counts up to the last step."""


@dataclass(frozen=True)
class Admission:
    """An admission of a sequence."""

    step: int
    record: AdmitRecord


@dataclass(frozen=True)
class Preemption:
    """A preemption of a sequence, and its cost."""

    step: int
    record: PreemptRecord
    tokens_recomputed: int = 0
    """Of the lost tokens, those that were computed again; the others were found in the cache, or never needed."""


@dataclass(frozen=True, slots=True)
class DraftCycle:
    """One draft and its verification, in numbers."""

    step: int
    proposer: str
    num_proposed: int
    num_accepted: int
    num_emitted: int
    won: bool
    """Whether the emitted tokens are this proposer's; of several proposers for one sequence, one wins."""
    target_positions: CachedPositions
    draft_positions: CachedPositions | None

    @classmethod
    def of(cls, cycle: SpecCycle, step: int) -> "DraftCycle":
        """Take the numbers from a cycle of one step."""
        counts = len(cycle.proposed), cycle.num_accepted, len(cycle.emitted)
        return cls(step, cycle.proposer, *counts, cycle.won, cycle.target_positions, cycle.draft_positions)


@dataclass(frozen=True)
class RequestTimeline(RequestTimes):
    """The history of one sequence of a request (one of its samples) so far. Seconds on the engine's clock."""

    seq_id: int
    request_id: str | None
    """None where the records begin after its arrival, as for the next three."""
    sample: int
    num_prompt_tokens: int | None
    arrived: float | None
    admitted: float | None
    """When it first began to run."""
    first_token: float | None
    """When the first output token was known."""
    last_token: float | None
    num_output_tokens: int
    tokens_cached: int
    """Tokens found in the cache at the first admission."""
    forwards: tuple[StepSpan, ...]
    """The steps that it took part in."""
    rows: tuple[int, ...]
    """Its rows in each of them, draft tokens included."""
    token_steps: tuple[StepSpan, ...]
    """The step of each output token."""
    finish: FinishRecord | None
    """How it ended; None if it has not."""
    finished_step: int | None
    admissions: tuple[Admission, ...]
    waits: tuple[Wait, ...]
    preemptions: tuple[Preemption, ...]
    cycles: tuple[DraftCycle, ...]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None if it has not."""
        return None if self.finish is None else self.finish.reason

    @property
    def tokens_computed(self) -> int:
        """The number of rows that went through the model for it."""
        return sum(self.rows)

    @property
    def times_preempted(self) -> int:
        """The number of its preemptions."""
        return len(self.preemptions)

    @property
    def tokens_recomputed(self) -> int:
        """The number of tokens that were computed before a preemption and again after it."""
        return sum(preemption.tokens_recomputed for preemption in self.preemptions)

    @property
    def steps_waited(self) -> int:
        """The number of steps that it spent in the queue, over all its waits."""
        return sum(wait.num_steps for wait in self.waits)


@dataclass(slots=True)
class _Tally:
    """The steps in which the front of the queue waited for one kind of reason, over the whole run."""

    front: WaitRecord
    """As of the last of these steps."""
    previous: WaitRecord
    """Of the sequence that was at the front before that one."""
    steps: int = 0
    changes: int = 0
    """How often another sequence came to the front."""
    last_step: int = 0

    def add(self, front: WaitRecord, step: int) -> bool:
        """Count a step; return whether another sequence has come to the front."""
        changed = self.front.seq_id != front.seq_id or not self.steps
        if changed:
            self.previous = self.front
        self.front, self.last_step = front, step
        self.steps, self.changes = self.steps + 1, self.changes + changed
        return changed


@dataclass(slots=True)
class _OpenWait:
    """A wait that has not ended."""

    after: QueuedAfter
    first_step: int
    since: float
    before: dict[type, tuple[int, int]]
    """By kind of reason: the steps and changes of the tally that are not this wait's."""
    by_kind: dict[type, tuple[WaitRecord, int, int]] = field(default_factory=dict)
    """By kind: the sequence's own reason, in how many steps it had one, and the last of them."""


@dataclass(slots=True)
class _Sequence:
    """The state of a sequence's timeline."""

    seq_id: int
    request: ArriveRecord | None = None
    """None for one that is met before its arrival, in a trace from the middle of a run."""
    sample: int = 0
    arrival: int = 0
    """Its request's place in the order of arrival."""
    admitted: float | None = None
    tokens_cached: int = 0
    forwards: list[StepSpan] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    token_steps: list[StepSpan] = field(default_factory=list)
    finish: FinishRecord | None = None
    finished_step: int | None = None
    admissions: list[Admission] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    tokens_lost: int = 0
    """By the last preemption, until the sequence is admitted again and the cache says how many it still has."""
    cycles: list[DraftCycle] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        return self.token_steps[0].ended if self.token_steps else None

    @property
    def last_token(self) -> float | None:
        return self.token_steps[-1].ended if self.token_steps else None


class Timeline:
    """The timelines of all requests of one engine, read step by step.

    `request`, `metrics` and the queue may be asked for at any time. `forget` drops a sequence, which bounds the memory.
    """

    def __init__(self) -> None:
        self.journal: deque[StepRecord | ArriveRecord | FinishRecord] = deque()
        """What the engine wrote and has not been read: steps, and what happened between them."""
        self._sequences: dict[int, _Sequence] = {}
        self._without_admission: set[int] = set()
        """Sequences that begin without an `AdmitRecord`: samples after a request's first, and unknown ones."""
        self._told: set[int] = set()
        """The first sequence of each request that `arrive` told of and no step's record has named yet."""
        self._seq_ids: dict[str, tuple[int, ...]] = {}
        """By request id."""
        self._num_arrived = 0
        self._waiting: dict[int, _OpenWait] = {}
        """The queue, in the order in which sequences came to it."""
        self._running: dict[int, None] = {}
        """In the order of admission."""
        self._tallies: dict[type, _Tally] = {}
        self._step = 0
        self._now = 0.0

    # Records in

    def read(self) -> None:
        """Read the journal to its end.

        Ctrl-C takes effect at the end. After another exception in between the next call goes on: an arrival or an end
        is taken in again, which changes nothing; of a step, times and counts may be missing.
        """
        if not self.journal:
            return
        with _late_interrupt():
            while self.journal:
                entry = self.journal[0]
                if isinstance(entry, StepRecord):
                    self.add(self.journal.popleft())  # type: ignore[arg-type]
                    continue
                if isinstance(entry, ArriveRecord):
                    self.arrive(entry)
                else:
                    self.end(entry.seq_id, entry.reason)
                self.journal.popleft()

    def arrive(self, request: ArriveRecord) -> None:
        """Take in a request as soon as it is queued. The next step's record names it again, which changes nothing, even
        if it has ended and been forgotten meanwhile."""
        self._told.add(request.seq_ids[0])
        self._arrive(request, self._step + 1)

    def add(self, record: StepRecord) -> None:
        """Take in the next step."""
        for request in record.arrived:
            if request.seq_ids[0] in self._told:
                self._told.discard(request.seq_ids[0])
            else:
                self._arrive(request, record.step)
        for admission in record.admitted:
            self._admit(admission, record)
        for preemption in record.preempted:
            self._preempt(preemption, record)
        if record.execution_class == "prefill_only" or (record.items and record.items[-1].phase == "prefill_only"):
            self._begin_prefill_only(record)  # they come last
        if record.waiting:
            self._count_waits(record.waiting, record)
        self._step, self._now = record.step, record.ended
        sequences, span = self._sequences, StepSpan(record.step, record.started, record.ended, record.forward_ms)
        for seq_id, _, _, num_tokens, _, num_draft_tokens in record.items:  # by place: there may be thousands
            sequence = sequences.get(seq_id) or self._unknown(seq_id)
            sequence.forwards.append(span)
            sequence.rows.append(num_tokens + num_draft_tokens)
        for token in record.tokens:
            (sequences.get(token.seq_id) or self._unknown(token.seq_id)).token_steps.append(span)
        if self._without_admission:
            self._begin_without_admission(record)
        for cycle in record.cycles:
            self._known(cycle.seq_id).cycles.append(DraftCycle.of(cycle, record.step))
        for finish in record.finished:
            self._finish(finish)

    def end(self, seq_id: int, reason: FinishReason) -> None:
        """End a sequence between two steps, unless it has ended."""
        if self._known(seq_id).finish is None:
            self._finish(FinishRecord(seq_id, reason))

    def end_request(self, record: EndRecord) -> None:
        """End all unfinished sequences of a request, as a recorded run says of requests that ended between steps."""
        if seq_ids := self._seq_ids.get(record.request_id):
            for seq_id, reason in zip(seq_ids, record.reasons, strict=True):
                self.end(seq_id, reason)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        self.read()
        sequence = self._sequences.pop(seq_id, None)
        request = sequence.request if sequence is not None else None
        if request is not None and self._seq_ids.get(request.request_id) == request.seq_ids:
            del self._seq_ids[request.request_id]
        self._leave(seq_id)

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
        return tuple(sorted(self._waiting, key=lambda seq_id: self._queue_key(seq_id, order))[:most])

    def request(self, seq_id: int) -> RequestTimeline:
        """Return the timeline of one sequence so far. Raises `KeyError` for one that is not known."""
        self.read()
        sequence, waiting = self._sequences[seq_id], self._wait(seq_id, self._step, self._now, ended=False)
        request = sequence.request
        return RequestTimeline(
            seq_id=seq_id,
            request_id=request.request_id if request else None,
            sample=sequence.sample,
            num_prompt_tokens=request.num_prompt_tokens if request else None,
            arrived=request.arrived if request else None,
            admitted=sequence.admitted,
            first_token=sequence.first_token,
            last_token=sequence.last_token,
            num_output_tokens=len(sequence.token_steps),
            tokens_cached=sequence.tokens_cached,
            forwards=tuple(sequence.forwards),
            rows=tuple(sequence.rows),
            token_steps=tuple(sequence.token_steps),
            finish=sequence.finish,
            finished_step=sequence.finished_step,
            admissions=tuple(sequence.admissions),
            waits=(*sequence.waits, *([waiting] if waiting else ())),
            preemptions=tuple(sequence.preemptions),
            cycles=tuple(sequence.cycles),
        )

    def requests(self) -> tuple[RequestTimeline, ...]:
        """Return the timelines of all sequences, in the order of their ids."""
        self.read()
        return tuple(self.request(seq_id) for seq_id in sorted(self._sequences))

    def metrics(self, seq_id: int) -> RequestMetrics:
        """Return the metrics of one sequence so far. Its arrival must be known."""
        self.read()
        sequence = self._sequences[seq_id]
        assert sequence.request is not None, f"no arrival of sequence {seq_id}"
        return RequestMetrics(
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            num_output_tokens=len(sequence.token_steps),
            arrived=sequence.request.arrived,
            first_token=sequence.first_token,
            last_token=sequence.last_token,
            forward_ms=tuple([span.forward_ms for span in sequence.forwards]),
            forward_tokens=tuple(sequence.rows),
            admitted=sequence.admitted,
            times_preempted=len(sequence.preemptions),
            tokens_recomputed=sum([preemption.tokens_recomputed for preemption in sequence.preemptions]),
            tokens_cached=sequence.tokens_cached,
        )

    # Arrivals, admissions, preemptions, ends

    def _known(self, seq_id: int) -> _Sequence:
        return self._sequences.get(seq_id) or self._unknown(seq_id)

    def _unknown(self, seq_id: int) -> _Sequence:
        """Enter a sequence whose arrival is not in the records."""
        self._without_admission.add(seq_id)
        sequence = self._sequences[seq_id] = _Sequence(seq_id)
        return sequence

    def _arrive(self, request: ArriveRecord, first_step: int) -> None:
        """Enter a request: its first sample waits in the queue; further ones begin when their prompt has been
        computed."""
        self._seq_ids[request.request_id] = request.seq_ids
        self._num_arrived += 1
        for sample, seq_id in enumerate(request.seq_ids):
            self._sequences[seq_id] = _Sequence(seq_id, request, sample, self._num_arrived)
        self._without_admission.update(request.seq_ids[1:])
        self._waiting[request.seq_ids[0]] = self._open_wait("arrival", first_step, request.arrived)

    def _admit(self, admission: AdmitRecord, record: StepRecord) -> None:
        sequence = self._known(admission.seq_id)
        self._begin(sequence, record, admission.num_cached)
        self._running[admission.seq_id] = None
        sequence.admissions.append(Admission(record.step, admission))
        if sequence.tokens_lost:
            recomputed = max(0, sequence.tokens_lost - admission.num_cached)
            sequence.preemptions[-1] = replace(sequence.preemptions[-1], tokens_recomputed=recomputed)
            sequence.tokens_lost = 0

    def _begin(self, sequence: _Sequence, record: StepRecord, num_cached: int) -> None:
        """Take a sequence out of the queue: it begins with this step."""
        self._close_wait(sequence, record.step - 1, record.started, ended=True)
        self._leave(sequence.seq_id)
        if sequence.admitted is None:
            sequence.admitted, sequence.tokens_cached = record.started, num_cached

    def _begin_prefill_only(self, record: StepRecord) -> None:
        """Begin prefill-only requests, which end in the same step and need no admission."""
        for item in record.items:
            sequence = self._known(item.seq_id)
            if item.phase == "prefill_only" and sequence.admitted is None:
                self._begin(sequence, record, item.start)

    def _begin_without_admission(self, record: StepRecord) -> None:
        """Begin a further sample: it has its first token when the prompt is computed, and runs from its first own row
        on."""
        without = self._without_admission
        for token in record.tokens:
            if token.seq_id in without and self._sequences[token.seq_id].admitted is None:
                self._sequences[token.seq_id].admitted = record.started
                self._waiting[token.seq_id] = self._open_wait("arrival", record.step + 1, record.ended)
        for item in record.items:
            if item.seq_id in without:
                self._leave(item.seq_id)
                self._running[item.seq_id] = None

    def _preempt(self, preemption: PreemptRecord, record: StepRecord) -> None:
        sequence = self._known(preemption.seq_id)
        sequence.preemptions.append(Preemption(record.step, preemption))
        sequence.tokens_lost = preemption.tokens_lost
        self._leave(preemption.seq_id)
        self._waiting[preemption.seq_id] = self._open_wait("preemption", record.step, record.started)

    def _finish(self, finish: FinishRecord) -> None:
        sequence = self._known(finish.seq_id)
        self._close_wait(sequence, self._step, self._now, ended=False)
        self._leave(finish.seq_id)
        if sequence.finish is None or sequence.finish == FinishRecord(finish.seq_id, finish.reason):
            sequence.finish, sequence.finished_step = finish, self._step  # a step's record may say more than `end` did

    def _leave(self, seq_id: int) -> None:
        """Take a sequence out of the queue and out of the batch, wherever it is."""
        self._waiting.pop(seq_id, None)
        self._running.pop(seq_id, None)
        self._without_admission.discard(seq_id)

    # Waits

    def _queue_key(self, seq_id: int, order: str) -> tuple[int, float, int]:
        sequence = self._sequences[seq_id]
        request = sequence.request
        if request is None:
            return 0, -1.0, seq_id  # it came before the records began
        tokens = request.num_prompt_tokens + request.max_output_tokens
        aged = tokens + AGING_TOKENS * sequence.arrival
        return {"priority": request.priority, "sjf": tokens, "sjf-aged": aged}.get(order, 0), request.arrived, seq_id

    def _open_wait(self, after: QueuedAfter, first_step: int, since: float) -> _OpenWait:
        before = {kind: (tally.steps, tally.changes) for kind, tally in self._tallies.items()}
        return _OpenWait(after, first_step, since, before)

    def _close_wait(self, sequence: _Sequence, last_step: int, until: float, ended: bool) -> None:
        wait = self._wait(sequence.seq_id, last_step, until, ended)
        if wait is not None:
            sequence.waits.append(wait)

    def _count_waits(self, waits: Sequence[WaitRecord], record: StepRecord) -> None:
        """Count the step for the queue, except for the sequences that had reasons of their own.

        A deferred sequence lets others pass, so it is never the front that they wait for."""
        front = next((wait for wait in waits if not isinstance(wait.reason, Deferred)), None)
        for named in waits:
            if named.seq_id not in self._waiting:  # its arrival was not recorded
                self._known(named.seq_id)
                self._waiting[named.seq_id] = self._open_wait("arrival", record.step, record.started)
        changed = False
        if front is not None:
            tally = self._tallies.setdefault(type(front.reason), _Tally(front, front))
            changed = tally.add(front, record.step)
        for named in waits:
            wait, kind = self._waiting[named.seq_id], type(named.reason)
            _, num_steps, _ = wait.by_kind.get(kind, (named, 0, 0))
            wait.by_kind[kind] = named, num_steps + 1, record.step
            if front is not None:
                steps, changes = wait.before.get(type(front.reason), (0, 0))
                wait.before[type(front.reason)] = steps + 1, changes + changed

    def _wait(self, seq_id: int, last_step: int, until: float, ended: bool) -> Wait | None:
        """Return the open wait of a sequence up to `last_step`; None if every step computed it."""
        wait = self._waiting.get(seq_id)
        if wait is None or last_step < wait.first_step:
            return None
        num_steps = last_step - wait.first_step + 1
        return Wait(wait.after, wait.first_step, num_steps, max(0.0, until - wait.since), self._causes(wait), ended)

    def _causes(self, wait: _OpenWait) -> tuple[Cause, ...]:
        """Return the reasons of the queue's front that are this wait's, and the sequence's own, in the order of their
        last steps."""
        causes = [(step, 1, Cause(named.reason, named.seq_id, steps)) for named, steps, step in wait.by_kind.values()]
        fronts = {named.seq_id for named, _, _ in wait.by_kind.values()}
        for kind, tally in self._tallies.items():
            steps, changes = wait.before.get(kind, (0, 0))
            if tally.steps > steps:
                front = tally.previous if tally.front.seq_id in fronts else tally.front
                cause = Cause(front.reason, front.seq_id, tally.steps - steps, tally.changes - changes > 1)
                causes.append((tally.last_step, 0, cause))
        return tuple([cause for _, _, cause in sorted(causes, key=lambda entry: entry[:2])])


@contextmanager
def _late_interrupt() -> Iterator[None]:
    """Have SIGINT handled at the end of the block. It comes to the main thread only."""
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


def timeline_of(steps: Iterable[StepRecord], ends: Iterable[EndRecord] = ()) -> Timeline:
    """Build the timeline of a whole run."""
    timeline = Timeline()
    for step in steps:
        timeline.add(step)
    for end in ends:
        timeline.end_request(end)
    return timeline
