"""What one step will do, decided before anything is computed, and what came of it.

The scheduler makes a plan without touching a model or an array; the engine carries it out. A prefill, a chunk of one, a
decode and a verification of draft tokens are the same item with other numbers.

The order in which a plan is carried out is part of its meaning: swap-outs read their blocks first, then block copies
run, then swap-ins, then the forward pass writes. So a block that a swapped sequence gave up may be taken within the
same plan, and nothing is overwritten before it has been read.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from forge.cache.host_pool import Swap
from forge.cache.kv_storage import BlockCopy
from forge.engine.sequence import Sequence
from forge.reasons import ExecutionClass, FinishReason, Phase
from forge.trace.records import AdmitRecord, PreemptRecord, WaitRecord


class ForkSlots(NamedTuple):
    """The slots of a further draft for the same sequence: a fork in the cache, for one step."""

    seq_id: int
    """Below 0: no sequence has such an id."""
    block_table: tuple[int, ...]
    """Of the same positions as the item's."""


class PlanItem(NamedTuple):
    """Compute `num_tokens` known rows of a sequence, the first of which stands at position `start`.

    Known are the tokens that have been chosen, unlike draft tokens.
    """

    seq_id: int
    sequence: Sequence
    start: int
    num_tokens: int
    logit_rows: range
    """The rows that need logits, counted from its first: some of the known ones, then one for every draft slot."""
    chooses_token: bool
    """True if the last row's logits choose a token."""
    phase: Phase
    block_table: tuple[int, ...]
    """The blocks of all positions that the item reads or writes, and perhaps of later ones, as of this step."""

    # A plain decode step needs no field below.

    remaining: int = 0
    """Known tokens that a later step has to compute: the rest of a prompt that comes in chunks."""
    num_draft_slots: int = 0
    """Slots reserved after the known rows, one for each draft token that may be verified."""
    forks: tuple[ForkSlots, ...] = ()
    """Each computes as many rows as the item, with draft tokens of its own."""
    follows: int | None = None
    """Async scheduling: the input token is the token of this row of the previous step."""
    num_published: int = 0
    """Prefill-only: tokens, from the first on, whose blocks stay cached when the step is over."""


@dataclass(frozen=True)
class StepPlan:
    """One step: which rows are computed, where they are written, and why the other sequences wait. A value that nothing
    changes."""

    items: tuple[PlanItem, ...]
    """The rows of the step's forward pass, in order. Prefill-only items come last."""

    # A plain decode step leaves the fields below empty.

    separate: tuple[PlanItem, ...] = ()
    """Items that take forward passes of their own: embeddings, and prompts scored in pieces."""
    copies: tuple[BlockCopy, ...] = ()
    """Block copies to perform, in order, before the step writes anything."""
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    admitted: tuple[AdmitRecord, ...] = ()
    """Generations that begin with this step."""
    waiting: tuple[WaitRecord, ...] = ()
    """Sequences that had to wait, with the reason: the heads of the queue's lanes, and all that were deferred."""
    preempted: tuple[PreemptRecord, ...] = ()
    exhausted: tuple[Sequence, ...] = ()
    """Those for which there will never be another block: they end as they are."""
    ahead: bool = False
    """True if it was made before the tokens of the step before it were known."""

    @property
    def execution_class(self) -> ExecutionClass:
        """`decode` where every item extends a running sequence by its next token, `prefill_only` where every item is
        prefill-only, `mixed` otherwise."""
        phases = {item.phase for item in (*self.items, *self.separate)}
        if phases == {"prefill_only"}:
            return "prefill_only"
        return "decode" if phases <= {"decode"} else "mixed"


@dataclass
class PlanBuilder:
    """A plan under construction."""

    limit: int
    """Tokens that the step may compute."""
    budget: int
    """Those that are left."""
    items: dict[int, PlanItem] = field(default_factory=dict)
    """Scheduled generations, by sequence id."""

    # A plain decode step leaves the fields below empty.

    prefill_only: list[PlanItem] = field(default_factory=list)
    separate: list[PlanItem] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    admitted: list[AdmitRecord] = field(default_factory=list)
    waiting: list[WaitRecord] = field(default_factory=list)
    preempted: list[PreemptRecord] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)
    needs_hidden: bool = False
    """An item has been scheduled whose task needs hidden states."""
    prefill_only_rows: int = 0
    temporary_bytes: int = 0
    """Of the arrays that the forward of these rows needs for itself."""
    num_scratch_blocks: int = 0
    """Taken by prefill-only sequences."""
    num_passing: int = 0
    """Prefill-only sequences that pass longer ones."""
    prefix_owners: dict[int, int] = field(default_factory=dict)
    """For each block that is not computed yet of the prompts under way, by its prefix key: the sequence that will
    compute it."""

    def add(self, item: PlanItem) -> None:
        """Schedule the rows of a sequence that holds slots and blocks."""
        self.items[item.seq_id] = item
        self.needs_hidden |= item.sequence.task.pooling is not None
        self.budget -= item.num_tokens

    def set_apart(self, max_logit_rows: int) -> None:
        """Move the items that take forward passes of their own to `separate`: embeddings, and what has more rows of
        logits than this."""
        items = [*self.items.values(), *self.prefill_only]
        self.separate = [item for item in items if item.sequence.task.pooling or len(item.logit_rows) > max_logit_rows]
        for item in self.separate:
            if self.items.pop(item.seq_id, None) is None:
                self.prefill_only.remove(item)

    def drop(self, seq_id: int, blocks: tuple[int, ...] = ()) -> None:
        """Take a sequence out of the plan again, and with it the copies into its `blocks`."""
        item = self.items.pop(seq_id, None)
        if item is not None:
            self.budget += item.num_tokens
        self.copies = [copy for copy in self.copies if copy.destination not in blocks]

    @property
    def prefill_tokens(self) -> int:
        """The number of rows of generations that do not decode."""
        return sum(item.num_tokens for item in self.items.values() if item.phase == "prefill")

    def build(self) -> StepPlan:
        return StepPlan(
            items=(*self.items.values(), *self.prefill_only),
            separate=tuple(self.separate),
            copies=tuple(self.copies),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            admitted=tuple(self.admitted),
            waiting=tuple(self.waiting),
            preempted=tuple(self.preempted),
            exhausted=tuple(self.exhausted),
        )


class Outcome(NamedTuple):
    """What a step decided for one sequence."""

    seq_id: int
    position: int
    """Where the first of `token_ids` stands in its sequence."""
    token_ids: tuple[int, ...]
    """The tokens chosen: none where none was asked for, several where draft tokens were accepted."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    num_accepted: int = 0
    """Draft tokens whose keys and values are right."""
    winner: int | None = None
    """The fork that computed them, where that was not the item itself."""
