"""Scheduling policies, each a small pure function: which sequence is admitted first, and which gives way.

To add a policy, write one function; pass it as it is, or enter it in its table to give it a name.

What follows from each victim policy, where a running sequence (the requester) asks for a block and there is none:

| | `lifo` | `least-progressed` | order `priority` |
| --- | --- | --- | --- |
| gives way | the newest, as in vLLM | the one with the fewest output tokens | the one that would be admitted last |
| the requester | gives way itself if it is the newest | never gives way | gives way itself if it is the last |
| one sequence runs alone | it ends with reason `length`: the pool is its limit | the same | the same |
| a swapped-in sequence | newest again: it counts from its last admission | by its output tokens | by its priority |
| samples of one request | the later sample first | the later sample, of equals | the later sample, of equals |
| a victim waits | in order of arrival, before all newer requests | the same | in its priority, by arrival |

Which cached block is evicted is the prefix cache's to decide: `forge.cache.eviction`.

`lifo-others` is `lifo` but for the requester, which never gives way: the newest other sequence does.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from forge.engine.sequence import Sequence
from forge.errors import UsageError
from forge.reasons import AGING_TOKENS, PreemptionMode

AdmissionOrder = Callable[[Sequence], tuple[Any, ...]]
"""A key, taken when a sequence is queued: of two waiting sequences, the one with the smaller key is admitted first."""

VictimPolicy = Callable[[Items[Sequence], Sequence], Sequence | None]
"""From the running sequences, in the order of their admission, and the one that needs blocks (one of them), to the one
that gives its blocks up. None if the requester runs alone."""


def first_come_first_served(sequence: Sequence) -> tuple[Any, ...]:
    """Order by arrival. A preempted sequence arrived before all that still wait for the first time, so it stands at the
    front of the queue."""
    return (sequence.arrival,)


def by_priority(sequence: Sequence) -> tuple[Any, ...]:
    """Order by priority, the lowest number first; equals by arrival."""
    return sequence.priority, sequence.arrival


def shortest_job_first(sequence: Sequence) -> tuple[Any, ...]:
    """Order by the tokens of prompt and output together, the fewest first. This gives the least mean wait; a long job
    starves for as long as short ones keep coming."""
    return sequence.num_prompt_tokens + sequence.max_output_tokens, sequence.arrival


def shortest_job_first_aged(sequence: Sequence) -> tuple[Any, ...]:
    """Order as `shortest_job_first`, with `AGING_TOKENS` added for each earlier arrival: only the next n /
    `AGING_TOKENS` arrivals can overtake a job of n tokens, so none starves."""
    return (shortest_job_first(sequence)[0] + AGING_TOKENS * sequence.arrival,)


def lifo(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Choose the most recently admitted sequence, which has usually computed the least; it may be the requester."""
    return running[-1] if len(running) > 1 else None


def lifo_others(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Choose the most recently admitted sequence except the requester: a newest requester takes blocks from an older
    one."""
    return next((sequence for sequence in reversed(running) if sequence is not requester), None)


def least_progressed(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Choose the sequence with the fewest output tokens, of equals the newest. Never the requester."""
    candidates = (sequence for sequence in running if sequence is not requester)
    return min(
        candidates, key=lambda sequence: (sequence.num_output_tokens, -sequence.arrival, -sequence.seq_id), default=None
    )


def worst_placed(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Choose the sequence that priority would serve last, of equals the later sample; it may be the requester."""
    return max(running, key=lambda sequence: (*by_priority(sequence), sequence.seq_id)) if len(running) > 1 else None


ADMISSION_ORDERS: dict[str, AdmissionOrder] = {
    "fcfs": first_come_first_served,
    "priority": by_priority,
    "sjf": shortest_job_first,
    "sjf-aged": shortest_job_first_aged,
}
VICTIM_POLICIES: dict[str, VictimPolicy] = {
    "lifo": lifo,
    "lifo-others": lifo_others,
    "least-progressed": least_progressed,
}
DEFAULT_TOKEN_BUDGET = 512
PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")


@dataclass(frozen=True)
class SchedulerConfig:
    """How a scheduler decides. Raises `UsageError` for a value that has no meaning, naming its option."""

    max_num_seqs: int = 16
    """Generations that may run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens that one step with a generation may compute; None is 512, or one for every sequence where that is more."""
    chunked_prefill: bool = True
    """Whether a prompt may come in pieces that share their steps with decodes (Agrawal et al. 2024, Sarathi-Serve).
    Without it a prompt is computed whole, in a step without decodes."""
    order: str | AdmissionOrder = "fcfs"
    """Which sequence is admitted first: one of `ADMISSION_ORDERS`, or such a function."""
    preempt: str | VictimPolicy = "lifo"
    """Which sequence is preempted: one of `VICTIM_POLICIES`, or such a function. With the order `priority` it is the
    worst placed instead."""
    preemption: PreemptionMode = "recompute"
    """What becomes of a victim's keys and values: dropped and computed again, or swapped out to the host pool."""
    num_host_blocks: int = 256
    """The size of the host pool in blocks."""
    prefix_planning: bool = True
    """Whether requests that begin with the same blocks, not yet cached, wait while one of them computes them. Without
    it a generation shares what is cached when it begins, and a prefill-only request is computed whole."""
    prefill_only: bool = True
    """Whether a generation of one token at most is prefill-only."""
    prefill_only_tokens: int = 2048
    """Prefill-only: tokens of a step that runs nothing else; one prompt may have more."""
    prefill_only_memory: int = 256 << 20
    """Prefill-only: bytes of temporary arrays in one step."""

    def __post_init__(self) -> None:
        names = {"order": tuple(ADMISSION_ORDERS), "preempt": tuple(VICTIM_POLICIES), "preemption": PREEMPTION_MODES}
        for name, supported in names.items():
            chosen = getattr(self, name)
            if chosen not in supported and (name == "preemption" or not callable(chosen)):
                raise UsageError(f"unknown --{name} {chosen!r}; supported: {', '.join(supported)}")
        for name in ("max_num_seqs", "prefill_only_tokens", "prefill_only_memory"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("max_num_batched_tokens", self.token_budget, 1)
        _require_whole("num_host_blocks", self.num_host_blocks, 0)
        if self.token_budget < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} leaves some of {self.max_num_seqs} sequences "
                "without their one token a step: raise it, or lower --max-num-seqs"
            )

    @property
    def token_budget(self) -> int:
        """Tokens that one step may compute."""
        if self.max_num_batched_tokens is None:
            return max(DEFAULT_TOKEN_BUDGET, self.max_num_seqs)
        return self.max_num_batched_tokens

    @property
    def admission_order(self) -> AdmissionOrder:
        return self.order if callable(self.order) else ADMISSION_ORDERS[self.order]

    @property
    def order_name(self) -> str:
        return _name(self.order)

    @property
    def victim_policy(self) -> tuple[str, VictimPolicy]:
        """The policy's name and the policy itself."""
        if self.order == "priority":
            return "priority", worst_placed
        return self.preempt_name, self.preempt if callable(self.preempt) else VICTIM_POLICIES[self.preempt]

    @property
    def preempt_name(self) -> str:
        return _name(self.preempt)


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"--{name.replace('_', '-')} must be a whole number of at least {least}, got {value!r}")


def _name(choice: str | Callable[..., Any]) -> str:
    """Return what records call a policy."""
    return choice if isinstance(choice, str) else choice.__name__.replace("_", "-")
