"""The timeline of every request: its times, waits, preemptions, forwards and draft cycles, read from `StepRecord`s.

`Timeline` is the one reader of step records. The engine feeds one while it runs and takes `RequestMetrics` from it; the
server, the views, replay and the exports read the same class, so that all of them tell the same story. It holds plain
data and never touches the engine: a recorded run gives the timeline that the run itself had.

A step's record names the sequence at the front of the queue and the reason why it waits; the sequences behind it wait
for it. To keep a step's cost independent of the length of the queue, `Timeline` counts each kind of reason once per
step, for the whole queue; what held for one sequence is the difference between two moments.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from forge.trace.records import (
    AGING_TOKENS,
    AdmitRecord,
    ArriveRecord,
    CachedPositions,
    Deferred,
    EndRecord,
    FinishReason,
    FinishRecord,
    PreemptRecord,
    RequestMetrics,
    RequestTimes,
    StepRecord,
    WaitReason,
    WaitRecord,
)

QueuedAfter = Literal["arrival", "preemption"]


@dataclass(frozen=True, slots=True)
class StepSpan:
    """When a step ran, in seconds on the engine's clock. One value is shared by all sequences of the step."""

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
    """A time in the queue."""

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
    """A sequence was admitted."""

    step: int
    record: AdmitRecord


@dataclass(frozen=True)
class Preemption:
    """A sequence was preempted, and what that cost it."""

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


@dataclass(frozen=True)
class RequestTimeline(RequestTimes):
    """What happened to one sequence of a request (one of its samples) until now. Seconds on the engine's clock."""

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
        """Why it ended; None if it has not."""
        return None if self.finish is None else self.finish.reason

    @property
    def tokens_computed(self) -> int:
        """Rows that went through the model for it."""
        return sum(self.rows)

    @property
    def times_preempted(self) -> int:
        """The number of its preemptions."""
        return len(self.preemptions)

    @property
    def tokens_recomputed(self) -> int:
        """Tokens that were computed before a preemption and again after it."""
        return sum(one.tokens_recomputed for one in self.preemptions)

    @property
    def steps_waited(self) -> int:
        """Steps that it spent in the queue, over all its waits."""
        return sum(wait.num_steps for wait in self.waits)


@dataclass(slots=True)
class _Sequence:
    """What is known of a sequence so far."""

    seq_id: int
    request: ArriveRecord | None = None
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

    def timeline(self, waiting: Wait | None) -> RequestTimeline:
        """`waiting`: its wait that has not ended."""
        request = self.request
        return RequestTimeline(
            self.seq_id,
            request.request_id if request else None,
            self.sample,
            request.num_prompt_tokens if request else None,
            request.arrived if request else None,
            self.admitted,
            self.first_token,
            self.last_token,
            len(self.token_steps),
            self.tokens_cached,
            tuple(self.forwards),
            tuple(self.rows),
            tuple(self.token_steps),
            self.finish,
            self.finished_step,
            tuple(self.admissions),
            (*self.waits, waiting) if waiting else tuple(self.waits),
            tuple(self.preemptions),
            tuple(self.cycles),
        )


@dataclass(slots=True)
class _Tally:
    """Over the whole run: the steps in which the front of the queue waited for one kind of reason."""

    reason: WaitReason
    front: int
    """The sequence at the front, as of the last of these steps."""
    steps: int = 0
    changes: int = 0
    """How often another sequence came to the front."""
    last_step: int = 0


@dataclass(slots=True)
class _OwnReason:
    """The steps in which a waiting sequence had a reason of its own, of one kind."""

    reason: WaitReason
    steps: int = 0
    last_step: int = 0


@dataclass(slots=True)
class _Apart:
    """Of one kind of reason, what the run's tally counted in steps in which a sequence had a reason of its own."""

    steps: int = 0
    changes: int = 0


@dataclass(slots=True)
class _OpenWait:
    """A wait that has not ended."""

    after: QueuedAfter
    first_step: int
    since: float
    tallies_before: dict[type, tuple[int, int]]
    """Of each kind of reason, the tally's steps and changes when the wait began."""
    own: dict[type, _OwnReason] = field(default_factory=dict)
    apart: dict[type, _Apart] = field(default_factory=dict)
    front_before: dict[type, tuple[WaitReason, int]] = field(default_factory=dict)
    """Of each kind, the reason and the front of the queue before this sequence came to the front itself."""


class _Sequences(dict[int, _Sequence]):
    """By sequence id. One that is met before its arrival (a trace from the middle of a run) is entered as unknown."""

    def __init__(self, without_admission: set[int]):
        self._without_admission = without_admission

    def __missing__(self, seq_id: int) -> _Sequence:
        self._without_admission.add(seq_id)
        found = self[seq_id] = _Sequence(seq_id)
        return found


class Timeline:
    """The timelines of all requests of one engine, fed step by step.

    `arrive` and `add` take records in the order in which things happened, `end` what ended between two steps, and
    `forget` drops a sequence, which bounds the memory. `request` and `metrics` may be asked for at any time.
    """

    def __init__(self) -> None:
        self._without_admission: set[int] = set()
        """Sequences that begin without an `AdmitRecord`: samples after a request's first, and unknown ones."""
        self._sequences = _Sequences(self._without_admission)
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

    def arrive(self, request: ArriveRecord) -> None:
        """Take in a request as soon as it is queued. The next step's record names it again, which changes nothing, even
        if it has ended and been forgotten meanwhile."""
        self._told.add(request.seq_ids[0])
        self._arrive(request, self._step + 1)

    def add(self, record: StepRecord) -> None:
        """Take in the next step."""
        if record.arrived:
            for request in record.arrived:
                if request.seq_ids[0] in self._told:
                    self._told.discard(request.seq_ids[0])
                else:
                    self._arrive(request, record.step)
        if record.admitted:
            for admission in record.admitted:
                self._admit(admission, record)
        if record.preempted:
            for preemption in record.preempted:
                self._preempt(preemption, record)
        if record.waiting:
            self._count_waits(record.waiting, record)
        self._step, self._now = record.step, record.ended
        sequences = self._sequences
        times = StepSpan(record.step, record.started, record.ended, record.forward_ms)
        for (
            seq_id,
            _,
            _,
            num_tokens,
            _,
            num_draft_tokens,
        ) in record.items:  # faster than by field: there may be thousands
            own = sequences[seq_id]
            own.forwards.append(times)
            own.rows.append(num_tokens + num_draft_tokens)
        for token in record.tokens:
            sequences[token.seq_id].token_steps.append(times)
        if record.execution_class == "prefill_only" or (record.items and record.items[-1].phase == "prefill_only"):
            self._begin_prefill_only(record)  # they come last
        if self._without_admission:
            self._begin_without_admission(record)
        if record.cycles:
            self._count_cycles(record)
        if record.finished:
            for finish in record.finished:
                self._finish(finish)

    def end(self, seq_id: int, reason: FinishReason) -> None:
        """End a sequence between two steps, unless it has ended."""
        if self._sequences[seq_id].finish is None:
            self._finish(FinishRecord(seq_id, reason))

    def end_request(self, record: EndRecord) -> None:
        """End all sequences of a request that have not, as a recorded run says of requests that ended between steps."""
        for seq_id, reason in zip(self._seq_ids.get(record.request_id, ()), record.reasons, strict=False):
            self.end(seq_id, reason)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        own = self._sequences.pop(seq_id, None)
        if (
            own is not None
            and own.request is not None
            and self._seq_ids.get(own.request.request_id) == own.request.seq_ids
        ):
            del self._seq_ids[own.request.request_id]
        self._leave(seq_id)

    # Timelines out

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    @property
    def running(self) -> tuple[int, ...]:
        """Sequences that have a place in the batch after the last step, in the order of admission."""
        return tuple(self._running)

    def queue(self, order: str = "fcfs", most: int | None = None) -> tuple[int, ...]:
        """Sequences that wait for a place, in the order in which they will get one; the first `most`. order: the name
        of one of the engine's admission orders."""
        return tuple(sorted(self._waiting, key=lambda seq_id: self._queue_key(seq_id, order))[:most])

    def request(self, seq_id: int) -> RequestTimeline:
        """The timeline of one sequence until now."""
        return self._sequences[seq_id].timeline(self._wait(seq_id, self._step, self._now, ended=False))

    def requests(self) -> tuple[RequestTimeline, ...]:
        """The timelines of all sequences, in the order of their ids."""
        return tuple(self.request(seq_id) for seq_id in sorted(self._sequences))

    def metrics(self, seq_id: int) -> RequestMetrics:
        """The metrics of one sequence until now. Its arrival must be known."""
        own = self._sequences[seq_id]
        assert own.request is not None, f"no arrival of sequence {seq_id}"
        return RequestMetrics(
            num_prompt_tokens=own.request.num_prompt_tokens,
            num_output_tokens=len(own.token_steps),
            arrived=own.request.arrived,
            first_token=own.first_token,
            last_token=own.last_token,
            forward_ms=tuple([step.forward_ms for step in own.forwards]),
            forward_tokens=tuple(own.rows),
            admitted=own.admitted,
            times_preempted=len(own.preemptions),
            tokens_recomputed=sum([one.tokens_recomputed for one in own.preemptions]),
            tokens_cached=own.tokens_cached,
        )

    # Arrivals, admissions, preemptions, ends

    def _arrive(self, request: ArriveRecord, first_step: int) -> None:
        """The first sample waits in the queue; the others begin when the prompt that they share has been computed."""
        first, *others = request.seq_ids
        self._seq_ids[request.request_id] = request.seq_ids
        self._num_arrived += 1
        self._sequences[first] = _Sequence(first, request, arrival=self._num_arrived)
        self._waiting[first] = self._open_wait("arrival", first_step, request.arrived)
        for sample, seq_id in enumerate(others, start=1):
            self._sequences[seq_id] = _Sequence(seq_id, request, sample, self._num_arrived)
            self._without_admission.add(seq_id)

    def _admit(self, admission: AdmitRecord, record: StepRecord) -> None:
        seq_id = admission.seq_id
        own = self._sequences[seq_id]
        self._close_wait(own, record.step - 1, record.started, ended=True)
        self._leave(seq_id)
        self._running[seq_id] = None
        own.admissions.append(Admission(record.step, admission))
        if own.admitted is None:
            own.admitted, own.tokens_cached = record.started, admission.num_cached
        if own.tokens_lost:
            recomputed = max(0, own.tokens_lost - admission.num_cached)
            own.preemptions[-1] = replace(own.preemptions[-1], tokens_recomputed=recomputed)
            own.tokens_lost = 0

    def _begin_prefill_only(self, record: StepRecord) -> None:
        """Prefill-only requests begin and end in one step, and need no admission."""
        for item in record.items:
            own = self._sequences[item.seq_id]
            if item.phase == "prefill_only" and own.admitted is None:
                own.admitted, own.tokens_cached = record.started, item.start
                self._close_wait(own, record.step - 1, record.started, ended=True)
                self._leave(item.seq_id)

    def _begin_without_admission(self, record: StepRecord) -> None:
        """A further sample has its first token when the prompt is computed, and runs from its first own row on."""
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
        seq_id = preemption.seq_id
        own = self._sequences[seq_id]
        own.preemptions.append(Preemption(record.step, preemption))
        own.tokens_lost = preemption.tokens_lost
        self._leave(seq_id)
        self._waiting[seq_id] = self._open_wait("preemption", record.step, record.started)

    def _count_cycles(self, record: StepRecord) -> None:
        for cycle in record.cycles:
            self._sequences[cycle.seq_id].cycles.append(
                DraftCycle(
                    record.step,
                    cycle.proposer,
                    len(cycle.proposed),
                    cycle.num_accepted,
                    len(cycle.emitted),
                    cycle.won,
                    cycle.target_positions,
                    cycle.draft_positions,
                )
            )

    def _finish(self, finish: FinishRecord) -> None:
        own = self._sequences[finish.seq_id]
        self._close_wait(own, self._step, self._now, ended=False)
        self._leave(finish.seq_id)
        if own.finish is None or own.finish == FinishRecord(finish.seq_id, finish.reason):
            own.finish, own.finished_step = finish, self._step  # a step's record may say more than `end` did

    def _leave(self, seq_id: int) -> None:
        """Take a sequence out of the queue and out of the batch, wherever it is."""
        self._waiting.pop(seq_id, None)
        self._running.pop(seq_id, None)
        self._without_admission.discard(seq_id)

    # Waits

    def _close_wait(self, own: _Sequence, last_step: int, until: float, ended: bool) -> None:
        wait = self._wait(own.seq_id, last_step, until, ended)
        if wait is not None:
            own.waits.append(wait)

    def _queue_key(self, seq_id: int, order: str) -> tuple[int, float, int]:
        request = self._sequences[seq_id].request
        if request is None:
            return 0, -1.0, seq_id  # it came before the records began
        tokens = request.num_prompt_tokens + request.max_output_tokens
        aged = tokens + AGING_TOKENS * self._sequences[seq_id].arrival
        return {"priority": request.priority, "sjf": tokens, "sjf-aged": aged}.get(order, 0), request.arrived, seq_id

    def _open_wait(self, after: QueuedAfter, first_step: int, since: float) -> _OpenWait:
        before = {kind: (tally.steps, tally.changes) for kind, tally in self._tallies.items()}
        return _OpenWait(after, first_step, since, before)

    def _count_waits(self, waits: Iterable[WaitRecord], record: StepRecord) -> None:
        """Count the step for the front of the queue and all behind it, and apart from them for those with a reason of
        their own. A deferred sequence lets others pass, so it is never the front that others wait for."""
        front = next((one for one in waits if not isinstance(one.reason, Deferred)), None)
        changed = front is not None and self._count_front(front, record.step)
        for one in waits:
            wait = self._waiting.get(one.seq_id)
            if wait is None:  # its arrival was not recorded
                self._sequences[one.seq_id]
                wait = self._waiting[one.seq_id] = self._open_wait("arrival", record.step, record.started)
                if front is not None:  # the tally has counted this step already
                    steps, changes = wait.tallies_before[type(front.reason)]
                    wait.tallies_before[type(front.reason)] = steps - 1, changes - changed
            own = wait.own.setdefault(type(one.reason), _OwnReason(one.reason))
            own.reason, own.steps, own.last_step = one.reason, own.steps + 1, record.step
            if front is not None:
                apart = wait.apart.setdefault(type(front.reason), _Apart())
                apart.steps, apart.changes = apart.steps + 1, apart.changes + changed

    def _count_front(self, front: WaitRecord, step: int) -> bool:
        """Enter the front of the queue into the tally of its kind; whether it is another sequence than before."""
        kind = type(front.reason)
        tally = self._tallies.get(kind)
        changed = tally is None or tally.front != front.seq_id
        if tally is None:
            tally = self._tallies[kind] = _Tally(front.reason, front.seq_id)
        elif changed and front.seq_id in self._waiting:
            self._waiting[front.seq_id].front_before[kind] = tally.reason, tally.front
        tally.reason, tally.front, tally.last_step = front.reason, front.seq_id, step
        tally.steps += 1
        tally.changes += changed
        return changed

    def _wait(self, seq_id: int, last_step: int, until: float, ended: bool) -> Wait | None:
        """The open wait of a sequence up to `last_step`; None where no step left it out."""
        wait = self._waiting.get(seq_id)
        if wait is None or last_step < wait.first_step:
            return None
        num_steps = last_step - wait.first_step + 1
        causes = tuple(self._causes(seq_id, wait))
        return Wait(wait.after, wait.first_step, num_steps, max(0.0, until - wait.since), causes, ended)

    def _causes(self, seq_id: int, wait: _OpenWait) -> list[Cause]:
        found: list[tuple[int, int, Cause]] = []
        for kind, tally in self._tallies.items():
            steps, changes = wait.tallies_before.get(kind, (0, 0))
            apart = wait.apart.get(kind, _Apart())
            behind = tally.steps - steps - apart.steps
            if behind:
                reason, front = wait.front_before[kind] if tally.front == seq_id else (tally.reason, tally.front)
                others_before = tally.changes - changes - apart.changes > 1
                found.append((tally.last_step, 0, Cause(reason, front, behind, others_before)))
        for own in wait.own.values():
            found.append((own.last_step, 1, Cause(own.reason, seq_id, own.steps)))
        return [cause for _, _, cause in sorted(found, key=lambda one: one[:2])]


def timeline_of(steps: Iterable[StepRecord], ends: Iterable[EndRecord] = ()) -> Timeline:
    """The timeline of a whole run."""
    timeline = Timeline()
    for step in steps:
        timeline.add(step)
    for end in ends:
        timeline.end_request(end)
    return timeline
