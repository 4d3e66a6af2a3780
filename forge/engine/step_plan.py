"""What one step will do, decided before anything is computed, and what came of it: frozen values.

The scheduler makes a plan without touching a model or an array; the engine carries it out. A prefill, a chunk of one, a
decode and a verification of guesses are all the same item with other numbers.

The order in which a plan is carried out is part of what it means: swap-outs read their blocks first, then block copies,
then swap-ins, then the forward pass writes. So a block that a swapped sequence gave up may be taken within the same
plan, and nothing is overwritten before it has been read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forge.cache.kv_storage import BlockCopy
from forge.trace.records import AdmitRecord, ExecutionClass, FinishReason, Phase, PreemptRecord, WaitRecord

if TYPE_CHECKING:
    from forge.engine.oneshot import OneShotItem


class ForkSlots(NamedTuple):
    """Where another run of guesses for the same sequence is computed beside the item's own: a fork in the cache, for
    the length of one step."""

    seq_id: int
    """Below 0: no sequence has such an id."""
    block_table: tuple[int, ...]
    """Of the same positions as the item's."""


class PlanItem(NamedTuple):
    """Compute `num_tokens` known rows of a sequence, the first of which stands at position `start`."""

    seq_id: int
    start: int
    num_tokens: int
    logit_rows: range
    """Which of the item's rows, counted from 0, need logits."""
    samples: bool
    """Whether the last row's logits choose a token."""
    phase: Phase
    block_table: tuple[int, ...]
    """The blocks of all positions that the item reads or writes, and perhaps of later ones, as of this step."""
    remaining: int = 0
    """Known tokens that a later step has to compute: the rest of a prompt that comes in chunks."""
    num_guesses: int = 0
    """Rows after the known ones that hold a guess each, to be verified: slots for as many are reserved."""
    forks: tuple[ForkSlots, ...] = ()
    """Each computes as many rows as the item, with guesses of its own."""
    follows: int | None = None
    """In a plan that was made ahead: the input token is the likeliest of this row of logits of the step before."""


class Swap(NamedTuple):
    """Move a sequence's keys and values between these blocks and the host's pool."""

    seq_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    items: tuple[PlanItem, ...]
    oneshots: tuple["OneShotItem", ...] = ()
    """Requests that the step answers and forgets."""
    copies: tuple[BlockCopy, ...] = ()
    """Block copies to perform, in order, before the step writes anything."""
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    admitted: tuple[AdmitRecord, ...] = ()
    """Sequences that begin with this step."""
    waiting: tuple[WaitRecord, ...] = ()
    """The first sequence that had to wait: those behind it wait for it."""
    preempted: tuple[PreemptRecord, ...] = ()
    exhausted: tuple[int, ...] = ()
    """Sequences for which there will never be another block: they end as they are."""
    ahead: bool = False
    """Whether it was made before the tokens of the step before it were known."""

    @property
    def execution_class(self) -> ExecutionClass:
        """`decode` where every item extends a running sequence by its next token, `oneshot` where nothing outlives the
        step, `mixed` otherwise."""
        if self.oneshots:
            return "mixed" if self.items else "oneshot"
        return "decode" if all(item.phase == "decode" for item in self.items) else "mixed"

    @property
    def num_tokens(self) -> int:
        """Rows that the step's forward pass has at most: there may be fewer guesses than there is room for."""
        return sum((item.num_tokens + item.num_guesses) * (1 + len(item.forks)) for item in self.items)


@dataclass
class Draft:
    """A plan while it is being made."""

    tokens: dict[int, int]
    """How many tokens each running sequence computes; none for those that are not in it."""
    limit: int
    """Tokens that the step may compute."""
    budget: int
    """Those that are left."""
    needs: dict[int, int]
    """Blocks that each running sequence takes when its slots are reserved."""
    guessing: bool = False
    """Whether anybody would guess."""
    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    admitted: list[AdmitRecord] = field(default_factory=list)
    waiting: list[WaitRecord] = field(default_factory=list)
    preempted: list[PreemptRecord] = field(default_factory=list)
    exhausted: list[int] = field(default_factory=list)
    leaders: dict[int, int] = field(default_factory=dict)
    """For each block that is being computed, by its key in the prefix index, the sequence that computes it."""
    starts: dict[int, int] = field(default_factory=dict)
    """Where sequences that were swapped in go on: the cache learns it when the step is committed."""

    def give_up(self, seq_id: int) -> None:
        """Nobody is left who could give this sequence a block: it ends where it is."""
        self.exhausted.append(seq_id)
        self.tokens.pop(seq_id, None)

    def finished(self, items: tuple[PlanItem, ...], oneshots: tuple["OneShotItem", ...]) -> StepPlan:
        """The plan."""
        lists = self.copies, self.swap_outs, self.swap_ins, self.admitted, self.waiting, self.preempted, self.exhausted
        return StepPlan(items, oneshots, *map(tuple, lists))


class Outcome(NamedTuple):
    """What a step brought for one sequence."""

    seq_id: int
    position: int
    """Where the first of `token_ids` stands in its sequence."""
    token_ids: tuple[int, ...]
    """The tokens chosen, none where none was asked for, several where guesses were accepted."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    num_accepted: int = 0
    """Guesses whose keys and values are right."""
    winner: int | None = None
    """The fork that computed them, where that was not the item itself."""
    forked: tuple["Outcome", ...] = ()
    """Those of the samples that begin as forks of this sequence."""


def flat(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Every outcome, those of forks after that of the sequence whose prompt they share."""
    for outcome in outcomes:
        yield outcome
        yield from outcome.forked
