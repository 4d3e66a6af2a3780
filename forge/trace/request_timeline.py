"""The timeline of one sequence of a request: what the records said of it, and what follows from that."""

from dataclasses import dataclass, field, replace
from typing import Any

from forge.reasons import FinishReason, WaitReason
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    DraftCycle,
    FinishRecord,
    PreemptRecord,
    RequestMetrics,
    RequestTimes,
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
