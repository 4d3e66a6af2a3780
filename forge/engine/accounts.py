"""What each sequence has cost so far, step by step; becomes its `RequestMetrics`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from forge.engine.sequence import Sequence
from forge.engine.step_plan import StepPlan
from forge.trace.records import ItemRecord, RequestMetrics, TokenRecord


@dataclass
class Work:
    """One sequence's account. Times are seconds on the engine's clock."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    forward_ms: list[float] = field(default_factory=list)
    forward_tokens: list[int] = field(default_factory=list)
    tokens_cached: int = 0
    tokens_recomputed: int = 0
    tokens_lost: int = 0
    """By its last preemption, while it waits: when it begins again the cache may still have some of them."""

    def metrics(self, sequence: Sequence) -> RequestMetrics:
        return RequestMetrics(
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            self.arrived,
            self.first_token,
            self.last_token,
            tuple(self.forward_ms),
            tuple(self.forward_tokens),
            self.admitted,
            sequence.times_preempted,
            self.tokens_recomputed,
            self.tokens_cached,
        )


class Accounts(dict[int, Work]):
    """By sequence id."""

    def enter(
        self,
        plan: StepPlan,
        items: Iterable[ItemRecord],
        tokens: Iterable[TokenRecord],
        forward_ms: float,
        started: float,
        now: float,
    ) -> None:
        """Add a step that began at `started`; its tokens exist `now`."""
        for admission in plan.admitted:
            own = self[admission.seq_id]
            if own.admitted is None:
                own.admitted, own.tokens_cached = started, admission.num_cached
            own.tokens_recomputed += max(0, own.tokens_lost - admission.num_cached)
            own.tokens_lost = 0
        for preemption in plan.preempted:
            self[preemption.seq_id].tokens_lost = preemption.tokens_lost
        for item in items:
            own = self[item.seq_id]
            own.forward_ms.append(forward_ms)
            own.forward_tokens.append(item.num_tokens + item.num_guesses)
        for token in tokens:
            own = self[token.seq_id]
            if own.first_token is None:
                own.first_token = now
                own.admitted = own.admitted if own.admitted is not None else started
            own.last_token = now
