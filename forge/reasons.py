"""The scheduler's own words: what a step is, why a sequence waits, gives way or ends.

The engine decides in these values, `trace` records them, and views show them (`forge.trace.explain` puts them into
sentences). They are plain data below both.
"""

from dataclasses import dataclass
from typing import Literal

AGING_TOKENS = 16
"""The tokens that each earlier arrival counts for in the admission order `sjf-aged`."""
Phase = Literal["prefill", "decode", "prefill_only"]
"""`prefill_only`: a judge, a score, an embedding; it needs one forward pass over its prompt and no decode."""
BudgetOption = Literal["max_num_batched_tokens", "prefill_only_tokens", "prefill_only_memory"]
"""The options that limit what one step computes."""
Pooling = Literal["last", "mean"]
ExecutionClass = Literal["prefill_only", "mixed", "decode"]
"""`decode` where every sequence of a step decodes, `prefill_only` where all its requests are, else `mixed`."""
FinishReason = Literal["stop", "length", "abort", "error"]
PreemptionMode = Literal["recompute", "swap"]


@dataclass(frozen=True)
class PoolExhausted:
    """The sequence has as many tokens as the whole cache has room for, so it ends."""

    num_tokens: int
    """Tokens that the pool holds."""


@dataclass(frozen=True)
class NoBlocks:
    """Too few free blocks for the sequence's tokens, once the running sequences have what they need in this step."""

    needed: int
    free: int


@dataclass(frozen=True)
class MaxNumSeqs:
    """The limit of running sequences is reached."""

    limit: int


@dataclass(frozen=True)
class NoBudget:
    """Sequences before this one have used the step's budget."""

    limit: int
    """The value of `option`, in tokens or bytes."""
    option: BudgetOption = "max_num_batched_tokens"
    """The option that sets the limit."""


@dataclass(frozen=True)
class HostPoolFull:
    """The host's pool has too few free blocks to swap to."""

    needed: int
    free: int


@dataclass(frozen=True)
class Deferred:
    """The sequence begins with blocks that another one is computing in this step; in the next step they are cached."""

    owner: int
    """The prefix owner: the sequence that computes the shared blocks."""
    num_tokens: int
    """Tokens that need not be computed twice."""


WaitReason = NoBlocks | MaxNumSeqs | NoBudget | Deferred
SpecReason = Literal["fixed", "wins", "turned_down", "loses", "probes", "on_again", "cannot_win"]
UndraftedReason = Literal["measures", "off", "no_proposal", "pauses", "no_room", "last_token", "not_wanted"]
