"""From steps to lives: what happened to each sequence, how long it waited, and why.

A step's record names the head of the queue and its reason; whoever stands behind the head waits for it. Putting the
steps together says of every sequence in which steps it waited, and for whom. Pure functions of records: the same for a
run on its way and for a recorded one. The times are those that the engine reports as `RequestMetrics`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forge.trace.records import (
    ArriveRecord,
    EndRecord,
    FinishReason,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    PreemptRecord,
    StepRecord,
    WaitReason,
)


@dataclass(frozen=True)
class Cause:
    """A part of a wait: steps in which the same kind of reason held."""

    reason: WaitReason
    """As of the last of these steps."""
    head: int
    """Whose reason it was: the sequence's own, or that of the head of the queue, which it stood behind."""
    num_steps: int
    heads_changed: bool = False
    """Whether others stood at the head before `head` did, in these steps."""


@dataclass(frozen=True)
class Wait:
    """A time in the queue."""

    after: Literal["arrival", "preemption"]
    first_step: int
    """The first step that left the sequence out."""
    num_steps: int
    seconds: float
    causes: tuple[Cause, ...]
    """In the order in which they last held."""
    ended: bool = True
    """Whether it was admitted. A wait that has not ended counts up to the last step."""


@dataclass(frozen=True)
class Preemption:
    step: int
    record: PreemptRecord
    tokens_recomputed: int = 0
    """Of the tokens lost, those that were computed again; the others were found in the cache, or never needed."""


@dataclass(frozen=True)
class Life:
    """One sequence from its arrival to its end. Times are seconds on the engine's clock."""

    seq_id: int
    request_id: str | None
    """None where the records begin after its arrival."""
    sample: int
    num_prompt_tokens: int | None
    arrived: float | None
    admitted: float | None
    first_token: float | None
    last_token: float | None
    num_output_tokens: int
    reason: FinishReason | None
    """Why it ended; None if it has not."""
    tokens_computed: int
    tokens_cached: int
    """Tokens found in the cache at the first admission."""
    waits: tuple[Wait, ...]
    preemptions: tuple[Preemption, ...]

    @property
    def queue_ms(self) -> float | None:
        """From arrival to the first admission."""
        return _ms(self.arrived, self.admitted)

    @property
    def time_to_first_token_ms(self) -> float | None:
        return _ms(self.arrived, self.first_token)

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Between one token and the next, on average, after the first; None with fewer than two."""
        whole = _ms(self.first_token, self.last_token)
        return whole / (self.num_output_tokens - 1) if whole and self.num_output_tokens > 1 else None

    @property
    def end_to_end_ms(self) -> float | None:
        """From arrival to the last token."""
        return _ms(self.arrived, self.last_token)

    @property
    def times_preempted(self) -> int:
        return len(self.preemptions)

    @property
    def tokens_recomputed(self) -> int:
        return sum(one.tokens_recomputed for one in self.preemptions)

    @property
    def steps_waited(self) -> int:
        return sum(wait.num_steps for wait in self.waits)


@dataclass
class _Tally:
    """One kind of reason, over the whole run so far. What held for one waiting sequence is the difference of two
    moments, so a step costs the same however many wait."""

    reason: WaitReason
    head: int
    steps: int = 0
    changes: int = 0
    """How often another sequence came to the head."""
    last_step: int = 0


@dataclass
class _Own:
    """Steps in which a waiting sequence was itself the head, for one kind of reason."""

    reason: WaitReason
    steps: int = 0
    arrivals: int = 0
    """How often it came to the head."""
    last_step: int = 0


@dataclass
class _Waiting:
    """A wait that has not ended."""

    after: Literal["arrival", "preemption"]
    first_step: int
    since: float
    steps_before: int
    """Steps of the run before it began."""
    tallies_before: dict[type, tuple[int, int]]
    """Of each kind, the steps and changes before it began."""
    own: dict[type, _Own] = field(default_factory=dict)
    led_by: dict[type, tuple[WaitReason, int]] = field(default_factory=dict)
    """Of each kind, the reason and the head before it came to the head itself."""


@dataclass
class _State:
    """What is known of a sequence so far."""

    seq_id: int
    request: ArriveRecord | None = None
    sample: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output_tokens: int = 0
    reason: FinishReason | None = None
    tokens_computed: int = 0
    tokens_cached: int = 0
    waits: list[Wait] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)

    def life(self, waiting: Wait | None) -> Life:
        request = self.request
        return Life(
            self.seq_id,
            request.request_id if request else None,
            self.sample,
            request.num_prompt_tokens if request else None,
            request.arrived if request else None,
            self.admitted,
            self.first_token,
            self.last_token,
            self.num_output_tokens,
            self.reason,
            self.tokens_computed,
            self.tokens_cached,
            (*self.waits, waiting) if waiting else tuple(self.waits),
            tuple(self.preemptions),
        )


class Lives:
    """Collects lives step by step."""

    def __init__(self):
        self._states: dict[int, _State] = {}
        self._waiting: dict[int, _Waiting] = {}
        """Those in the queue, in the order in which they came to it."""
        self._running: dict[int, None] = {}
        """In the order of their admission."""
        self._requests: dict[str, ArriveRecord] = {}
        self._past: list[Life] = []
        """Those whose id another life has taken over: the turns of a conversation before the last."""
        self._tallies: dict[type, _Tally] = {}
        self._steps = 0
        self._now = 0.0

    @property
    def running(self) -> tuple[int, ...]:
        """Sequences that have a place in the batch after the last step, in the order of their admission."""
        return tuple(self._running)

    def queue(self, by_priority: bool = False, most: int | None = None) -> tuple[int, ...]:
        """Sequences that have none and wait for one, in the order in which they will get it; the first `most`."""
        return tuple(sorted(self._waiting, key=lambda seq_id: self._place(seq_id, by_priority))[:most])

    def _place(self, seq_id: int, by_priority: bool) -> tuple[int, float, int]:
        request = self._state(seq_id).request
        if request is None:
            return 0, -1.0, seq_id  # it came before the records began
        return request.priority if by_priority else 0, request.arrived, seq_id

    def feed(self, record: StepRecord) -> None:
        """Take in the next step."""
        self._now = record.ended
        for request in record.arrived:
            self._arrive(request, record)
        for admission in record.admitted:
            self._admit(admission.seq_id, admission.num_cached, record)
        for preemption in record.preempted:
            self._running.pop(preemption.seq_id, None)
            self._state(preemption.seq_id).preemptions.append(Preemption(record.step, preemption))
            self._waiting[preemption.seq_id] = self._begin_wait("preemption", record.step, record.started)
        for wait in record.waiting:
            self._count_wait(wait.seq_id, wait.reason, record)
        self._steps += 1
        for item in record.items:
            self._state(item.seq_id).tokens_computed += item.num_tokens
            self._running.setdefault(item.seq_id)
            self._waiting.pop(item.seq_id, None)  # a sample that began with its prompt computed was not in the queue
        for token in record.tokens:
            self._take_token(token.seq_id, record)
        for finish in record.finished:
            self._finish(finish.seq_id, finish.reason)

    def end(self, record: EndRecord) -> None:
        """Take in the end of a request, which may have ended between two steps."""
        request = self._requests.get(record.request_id)
        for seq_id, reason in zip(request.seq_ids if request else (), record.reasons, strict=False):
            self._finish(seq_id, reason)

    def lives(self) -> tuple[Life, ...]:
        """Every sequence that was seen, by its id."""
        return (
            *self._past,
            *(state.life(self._wait(seq_id)) for seq_id, state in sorted(self._states.items())),
        )

    def _begin_wait(self, after: Literal["arrival", "preemption"], first_step: int, since: float) -> _Waiting:
        before = {kind: (tally.steps, tally.changes) for kind, tally in self._tallies.items()}
        return _Waiting(after, first_step, since, self._steps, before)

    def _count_wait(self, head: int, reason: WaitReason, record: StepRecord) -> None:
        """A step left the head of the queue out, and those behind it with it."""
        kind = type(reason)
        if head not in self._waiting:  # its arrival was not recorded
            self._waiting[head] = self._begin_wait("arrival", record.step, record.started)
        tally = self._tallies.get(kind)
        comes = tally is None or tally.head != head
        waiting = self._waiting[head]
        own = waiting.own.setdefault(kind, _Own(reason))
        if comes and tally is not None:
            waiting.led_by[kind] = tally.reason, tally.head
        own.reason, own.steps, own.arrivals, own.last_step = reason, own.steps + 1, own.arrivals + comes, record.step
        if tally is None:
            tally = self._tallies[kind] = _Tally(reason, head)
        tally.reason, tally.head, tally.steps, tally.last_step = reason, head, tally.steps + 1, record.step
        tally.changes += comes

    def _wait(self, seq_id: int, admitted: float | None = None) -> Wait | None:
        """A wait as it stands, or as it was until the step that began at `admitted`; None where no step was waited."""
        waiting = self._waiting.get(seq_id)
        if waiting is None or self._steps == waiting.steps_before:
            return None
        seconds = (self._now if admitted is None else admitted) - waiting.since
        steps = self._steps - waiting.steps_before
        causes = tuple(self._causes(seq_id, waiting))
        return Wait(waiting.after, waiting.first_step, steps, max(0.0, seconds), causes, admitted is not None)

    def _causes(self, seq_id: int, waiting: _Waiting) -> list[Cause]:
        found: list[tuple[int, int, Cause]] = []
        for kind, tally in self._tallies.items():
            steps_before, changes_before = waiting.tallies_before.get(kind, (0, 0))
            own = waiting.own.get(kind)
            behind = tally.steps - steps_before - (own.steps if own else 0)
            if behind:
                reason, head = waiting.led_by[kind] if tally.head == seq_id else (tally.reason, tally.head)
                heads = tally.changes - changes_before - (own.arrivals if own else 0)
                found.append((tally.last_step, 0, Cause(reason, head, behind, heads > 1)))
            if own:
                found.append((own.last_step, 1, Cause(own.reason, seq_id, own.steps)))
        return [cause for _, _, cause in sorted(found, key=lambda one: one[:2])]

    def _end_wait(self, state: _State, admitted: float | None) -> None:
        wait = self._wait(state.seq_id, admitted)
        if wait is not None:
            state.waits.append(wait)
        self._waiting.pop(state.seq_id, None)

    def _state(self, seq_id: int) -> _State:
        if seq_id not in self._states:
            self._states[seq_id] = _State(seq_id)
        return self._states[seq_id]

    def _arrive(self, request: ArriveRecord, record: StepRecord) -> None:
        """A request is in the queue. One that continues an ended sequence begins a new life under its id."""
        self._requests[request.request_id] = request
        for sample, seq_id in enumerate(request.seq_ids):
            if seq_id in self._states:
                self._past.append(self._states[seq_id].life(None))
            self._states[seq_id] = _State(seq_id, request, sample)
        first = request.seq_ids[0]
        self._waiting[first] = self._begin_wait("arrival", record.step, request.arrived)

    def _admit(self, seq_id: int, num_cached: int, record: StepRecord) -> None:
        state = self._state(seq_id)
        self._running[seq_id] = None
        self._end_wait(state, record.started)
        if state.admitted is None:
            state.admitted, state.tokens_cached = record.started, num_cached
        elif state.preemptions and state.preemptions[-1].record.tokens_lost:
            last = state.preemptions[-1]
            again = max(0, last.record.tokens_lost - num_cached)
            state.preemptions[-1] = Preemption(last.step, last.record, again)

    def _take_token(self, seq_id: int, record: StepRecord) -> None:
        state = self._state(seq_id)
        state.num_output_tokens += 1
        state.last_token = record.ended
        if state.first_token is None:
            state.first_token = record.ended
            if state.admitted is None:  # a sample that begins where another has computed their prompt
                state.admitted = record.started
                if seq_id not in self._running:  # until it takes part in a step, nobody says that it has a place
                    self._waiting[seq_id] = self._begin_wait("arrival", record.step + 1, record.ended)

    def _finish(self, seq_id: int, reason: FinishReason) -> None:
        state = self._state(seq_id)
        self._end_wait(state, None)
        self._running.pop(seq_id, None)
        state.reason = state.reason or reason


def lives_of(steps: Iterable[StepRecord], ends: Iterable[EndRecord] = ()) -> tuple[Life, ...]:
    """The lives of all sequences in a run."""
    lives = Lives()
    for step in steps:
        lives.feed(step)
    for end in ends:
        lives.end(end)
    return lives.lives()


def why(life: Life) -> tuple[str, ...]:
    """One line for each wait and each preemption of a sequence, in order: what it waited for, what it lost to whom."""
    told = [(wait.first_step, 1, wait_line(wait, life.seq_id)) for wait in life.waits]
    told += [(one.step, 0, preemption_line(one)) for one in life.preemptions]
    return tuple(line for _, _, line in sorted(told))


def wait_line(wait: Wait, seq_id: int) -> str:
    """`waited 12 steps (31.0 ms): behind 32, which needed 8 blocks and 2 were free`."""
    again = " again" if wait.after == "preemption" else ""
    begun = f"{'waited' if wait.ended else 'has waited'}{again} {_steps(wait.num_steps)} ({wait.seconds * 1e3:,.1f} ms)"
    texts = [_cause_text(cause, seq_id) for cause in wait.causes]
    if len(texts) > 1:
        texts = [f"for {_steps(cause.num_steps)} {text}" for cause, text in zip(wait.causes, texts, strict=True)]
    return f"{begun}: {'; '.join(texts)}" if texts else begun


def preemption_line(preemption: Preemption) -> str:
    """`preempted at step 40 for 12: needed 1 block, free 0; lifo; 37 tokens computed again`."""
    record = preemption.record
    asker = "itself, worst placed of all" if record.victim_of == record.seq_id else f"{record.victim_of}"
    if record.mode == "swap":
        cost = "swapped to the host's pool, nothing computed again"
    elif record.tokens_lost == 0:
        cost = "nothing was computed yet"
    elif preemption.tokens_recomputed == record.tokens_lost:
        cost = f"{record.tokens_lost} tokens computed again"
    else:
        cost = f"{record.tokens_lost} tokens lost, {preemption.tokens_recomputed} computed again"
    fallback = record.fallback
    full = f" (no swap: {fallback.needed} host blocks needed, {fallback.free} free)" if fallback else ""
    shortage = f"needed {record.needed} block{'' if record.needed == 1 else 's'}, free {record.free}"
    return f"preempted at step {preemption.step} for {asker}: {shortage}; {record.policy}; {cost}{full}"


def _cause_text(cause: Cause, seq_id: int) -> str:
    own = cause.head == seq_id
    behind = "" if own else f"behind {cause.head}, "
    if cause.heads_changed and not own:
        behind = f"behind others in turn, at last {cause.head}, "
    which = "it" if own else "which"
    match cause.reason:
        case NoBlocks(needed, free):
            blocks = f"{needed} block{'' if needed == 1 else 's'}"
            return f"{behind}{which} needed {blocks} and {free} {'was' if free == 1 else 'were'} free"
        case MaxNumSeqs(limit):
            return f"{behind}{'' if own else 'and '}{limit} sequences ran, as many as may (--max-num-seqs)"
        case NoBudget(limit):
            return f"{behind}{'' if own else 'and '}others had the step's {limit} tokens (--max-num-batched-tokens)"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of all lie, between neighbours in proportion; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ms(begun: float | None, ended: float | None) -> float | None:
    return None if begun is None or ended is None else (ended - begun) * 1e3
