"""What one step will do, decided before anything is computed: a frozen value.

The scheduler makes a plan without touching a model or an array; the engine carries it out. A prefill, a chunk of one, a
decode and a verification of guesses are all the same item with other numbers.
"""

from dataclasses import dataclass

from forge.cache.kv_storage import BlockCopy
from forge.trace.records import Phase


@dataclass(frozen=True)
class PlanItem:
    """Compute `num_tokens` rows of a sequence, the first of which stands at position `start`."""

    seq_id: int
    start: int
    num_tokens: int
    logit_rows: range
    """Which of the item's rows, counted from 0, need logits."""
    samples: bool
    """Whether the last row's logits choose a token."""
    phase: Phase
    block_table: tuple[int, ...]
    """The blocks of positions 0 to `start + num_tokens` - 1 as they are in this step."""


@dataclass(frozen=True)
class Waiting:
    """A sequence that this step leaves out, and why."""

    seq_id: int
    reason: "NoBlocks | MaxNumSeqs"


@dataclass(frozen=True)
class NoBlocks:
    """Too few free blocks."""

    needed: int
    free: int


@dataclass(frozen=True)
class MaxNumSeqs:
    """As many sequences run as may."""

    limit: int


@dataclass(frozen=True)
class StepPlan:
    items: tuple[PlanItem, ...]
    copies: tuple[BlockCopy, ...] = ()
    """Block copies to perform, in order, before the step writes anything."""
    admitted: tuple[int, ...] = ()
    """Sequences that begin with this step."""
    waiting: tuple[Waiting, ...] = ()
    """The first sequence that had to wait: those behind it wait for it."""
