"""The timeline of every request, read from `StepRecord`s: its times, waits, preemptions, forwards and draft cycles.

A timeline enters what a record says with the sequence that it names, and keeps which sequences each step refused. A
wait is a range of steps, and its causes are what these steps say: why they refused the sequence or, where they do not
name it, the front of the queue.

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
from typing import Any, Literal

from forge.reasons import AGING_TOKENS, Deferred, FinishReason, WaitReason
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    CachedPositions,
    EndRecord,
    FinishRecord,
    ItemRecord,
    PreemptRecord,
    RequestMetrics,
    RequestTimes,
    StepRecord,
    TokenRecord,
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
    """The reason in the last of these steps."""
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
    causes: tuple[Cause, ...] = ()
    """The causes in the order in which they last held."""
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
    """Lost tokens that were computed again; the others were found in the cache, or never needed."""


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
    finish: FinishRecord | None = None
    """The record of its end; None if it has not ended."""
    finished_step: int | None = None
    admissions: list[Admission] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    cycles: list[DraftCycle] = field(default_factory=list)

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
        return sum([preemption.tokens_recomputed for preemption in self.preemptions])

    @property
    def steps_waited(self) -> int:
        """The number of steps that it spent in the queue, over all its waits."""
        return sum(wait.num_steps for wait in self.waits)


class Timeline:
    """The timelines of all requests of one engine, read step by step.

    `request`, `metrics` and the queue may be asked for at any time. `forget` drops a sequence, which bounds the memory.
    """

    def __init__(self) -> None:
        self.journal: deque[StepRecord | ArriveRecord | FinishRecord] = deque()
        """Records that the engine wrote and that have not been read: steps, and what happened between them."""
        self._sequences: dict[int, RequestTimeline] = {}
        self._waiting: dict[int, tuple[QueuedAfter, int, float]] = {}
        """For each queued sequence: after what it was queued, the first step that left it out, and since when it
        waits."""
        self._running: dict[int, RequestTimeline] = {}
        """Running sequences in the order of admission."""
        self._refused: list[tuple[int, tuple[WaitRecord, ...]]] = []
        """Each step that refused sequences, and which, back to the arrival of the oldest sequence that is known."""
        self._told: set[int] = set()
        """The first sequence of each request that `arrive` told of and no step's record has named yet."""
        self._seq_ids: dict[str, tuple[int, ...]] = {}
        """Sequence ids by request id."""
        self._num_arrived, self._step, self._now = 0, 0, 0.0

    # Records in

    def read(self) -> None:
        """Read the journal to its end.

        Ctrl-C takes effect at the end. After another exception in between the next call goes on: an arrival or an end
        is taken in again, which changes nothing; of a step, times and counts may be missing.
        """
        with _late_interrupt() if self.journal else nullcontext():
            while self.journal:
                entry = self.journal[0]
                match entry:
                    case ArriveRecord():
                        self.arrive(entry)
                    case FinishRecord():
                        self.end(entry.seq_id, entry.reason)
                self.journal.popleft()
                if isinstance(entry, StepRecord):
                    self.add(entry)

    def arrive(self, request: ArriveRecord) -> None:
        """Take in a request as soon as it is queued. The next step's record names it again, which changes nothing, even
        if it has ended and been forgotten meanwhile."""
        self._told.add(request.seq_ids[0])
        self._enter(request, self._step + 1)

    def add(self, record: StepRecord) -> None:
        """Take in the next step."""
        for request in record.arrived:
            if request.seq_ids[0] in self._told:
                self._told.discard(request.seq_ids[0])
            else:
                self._enter(request, record.step)
        for admission in record.admitted:
            self._admit(admission, record)
        for preemption in record.preempted:
            self._known(preemption.seq_id).preemptions.append(Preemption(record.step, preemption))
            self._leave(preemption.seq_id)
            self._waiting[preemption.seq_id] = ("preemption", record.step, record.started)
        if record.waiting:
            self._refused.append((record.step, record.waiting))
            for wait in record.waiting:
                if wait.seq_id not in self._waiting:  # its arrival was not recorded
                    self._known(wait.seq_id)
                    self._waiting[wait.seq_id] = ("arrival", record.step, record.started)
        running, span = self._running, StepSpan(record.step, record.started, record.ended, record.forward_ms)
        for item in record.items:
            seq_id, _, _, num_tokens, _, num_draft_tokens = item  # by place: there may be thousands
            sequence = running.get(seq_id) or self._begin_unadmitted(item, record)
            sequence.forwards.append(span)
            sequence.rows.append(num_tokens + num_draft_tokens)
        for token in record.tokens:
            (running.get(token.seq_id) or self._begin_sample(token, record)).token_steps.append(span)
        self._step, self._now = record.step, record.ended
        for cycle in record.cycles:
            counts = len(cycle.proposed), cycle.num_accepted, len(cycle.emitted)
            positions = cycle.target_positions, cycle.draft_positions
            draft_cycle = DraftCycle(record.step, cycle.proposer, *counts, cycle.won, *positions)
            self._known(cycle.seq_id).cycles.append(draft_cycle)
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
        """Drop a sequence, and the refusals that no other one asks for."""
        self.read()
        sequence = self._sequences.pop(seq_id, None)
        self._leave(seq_id)
        if sequence is not None and sequence.request is not None:
            self._seq_ids.pop(sequence.request.request_id, None)
        if self._refused:
            oldest = next(iter(self._sequences.values()), None)
            del self._refused[: len(self._refused) if oldest is None else self._index_of(oldest.entered)]

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
        """Return a copy of the timeline of one sequence so far. Raises `KeyError` for one that is not known."""
        self.read()
        sequence = self._sequences[seq_id]
        waits = [*sequence.waits, *self._wait(seq_id, self._step, self._now, ended=False)]
        lists: dict[str, Any] = {name: value[:] for name, value in vars(sequence).items() if isinstance(value, list)}
        lists["waits"] = [replace(wait, causes=self._causes(seq_id, wait)) for wait in waits]
        return replace(sequence, **_token_times(sequence), **lists)

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
            arrived=sequence.request.arrived,
            forward_ms=tuple([span.forward_ms for span in sequence.forwards]),
            forward_tokens=tuple(sequence.rows),
            admitted=sequence.admitted,
            times_preempted=sequence.times_preempted,
            tokens_recomputed=sequence.tokens_recomputed,
            tokens_cached=sequence.tokens_cached,
            **_token_times(sequence),
        )

    # Arrivals, admissions, ends

    def _known(self, seq_id: int) -> RequestTimeline:
        """Return a sequence. Enters one whose arrival is not in the records."""
        return self._sequences.get(seq_id) or self._sequences.setdefault(seq_id, RequestTimeline(seq_id, self._step))

    def _enter(self, request: ArriveRecord, first_step: int) -> None:
        """Enter a request: its first sample waits in the queue; further ones begin when their prompt has been
        computed."""
        self._seq_ids[request.request_id] = request.seq_ids
        self._num_arrived += 1
        for sample, seq_id in enumerate(request.seq_ids):
            place = self._num_arrived
            self._sequences[seq_id] = RequestTimeline(seq_id, first_step, request, sample, place, request.arrived)
        self._waiting[request.seq_ids[0]] = ("arrival", first_step, request.arrived)

    def _admit(self, admission: AdmitRecord, record: StepRecord) -> None:
        sequence = self._begin(self._known(admission.seq_id), record, admission.num_cached)
        last = sequence.admissions[-1].step if sequence.admissions else 0
        sequence.admissions.append(Admission(record.step, admission))
        if sequence.preemptions and (preemption := sequence.preemptions[-1]).step > last:
            recomputed = max(0, preemption.record.tokens_lost - admission.num_cached)
            sequence.preemptions[-1] = replace(preemption, tokens_recomputed=recomputed)

    def _begin(self, sequence: RequestTimeline, record: StepRecord, num_cached: int) -> RequestTimeline:
        """Move a sequence from the queue to the batch: it runs from this step on."""
        sequence.waits += self._wait(sequence.seq_id, record.step - 1, record.started, ended=True)
        self._leave(sequence.seq_id)
        if sequence.finish is None:
            self._running[sequence.seq_id] = sequence
        if sequence.admitted is None:
            sequence.admitted, sequence.tokens_cached = record.started, num_cached
        return sequence

    def _begin_unadmitted(self, item: ItemRecord, record: StepRecord) -> RequestTimeline:
        """Begin a sequence that computes rows without an `AdmitRecord`: a prefill-only request, which ends in the same
        step, a further sample, or one that ran before the records began."""
        sequence = self._known(item.seq_id)
        if sequence.admitted is not None:
            self._waiting.pop(item.seq_id, None)  # a sample that had a slot and sat steps out was in no queue
        return self._begin(sequence, record, item.start if item.phase == "prefill_only" else 0)

    def _begin_sample(self, token: TokenRecord, record: StepRecord) -> RequestTimeline:
        """Begin a further sample: it has its first token when the prompt is computed, and waits until it computes."""
        sequence = self._known(token.seq_id)
        if sequence.admitted is None:
            sequence.admitted = record.started
            self._waiting[token.seq_id] = ("arrival", record.step + 1, record.ended)
        return sequence

    def _finish(self, finish: FinishRecord) -> None:
        sequence = self._known(finish.seq_id)
        sequence.waits += self._wait(finish.seq_id, self._step, self._now, ended=False)
        self._leave(finish.seq_id)
        if sequence.finish is None or sequence.finish == FinishRecord(finish.seq_id, finish.reason):
            sequence.finish, sequence.finished_step = finish, self._step  # a step's record may say more than `end` did

    def _leave(self, seq_id: int) -> None:
        """Take a sequence out of the queue and out of the batch, wherever it is."""
        self._waiting.pop(seq_id, None)
        self._running.pop(seq_id, None)

    # Waits

    def _queue_key(self, seq_id: int, order: str) -> tuple[int, float, int]:
        request, place = self._sequences[seq_id].request, self._sequences[seq_id].place
        if request is None:
            return 0, -1.0, seq_id  # it came before the records began
        tokens = request.num_prompt_tokens + request.max_output_tokens
        keys = {"priority": request.priority, "sjf": tokens, "sjf-aged": tokens + AGING_TOKENS * place}
        return keys.get(order, 0), request.arrived, seq_id

    def _wait(self, seq_id: int, last_step: int, until: float, ended: bool) -> list[Wait]:
        """Return the wait of a queued sequence up to `last_step`, without causes; none if every step computed it."""
        after, first_step, since = self._waiting.get(seq_id, ("arrival", last_step + 1, until))
        num_steps = last_step - first_step + 1
        return [Wait(after, first_step, num_steps, max(0.0, until - since), ended=ended)] if num_steps > 0 else []

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
        return tuple(
            [
                Cause(group[-1].reason, group[-1].seq_id, len(group), len({record.seq_id for record in group}) > 1)
                for group in groups.values()
            ]
        )


def _token_times(sequence: RequestTimeline) -> dict[str, Any]:
    steps = sequence.token_steps
    first, last = (steps[0].ended, steps[-1].ended) if steps else (None, None)
    return {"first_token": first, "last_token": last, "num_output_tokens": len(steps)}


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
