"""What happened, as plain data: one `StepRecord` per engine step, and the metrics that follow from them.

Everything that is shown, recorded, replayed or served is made from these values. They hold no arrays and no objects of
the engine, so any module may import them, and writing one as JSON loses nothing. They give reasons as data;
`forge.trace.explain` puts them into words.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from forge.reasons import (
    ExecutionClass,
    FinishReason,
    HostPoolFull,
    Phase,
    PoolExhausted,
    PreemptionMode,
    SpecReason,
    UndraftedReason,
    WaitReason,
)

FORMERLY = {
    "leader": "owner",
    "num_guesses": "num_draft_tokens",
    "oneshot": "prefill_only",
    "policy": "preempt",
    "mode": "preemption",
    "waits": "loses",
    "slots_filled": "tokens_held",
}
"""Former names and values of fields in older traces → those of now."""


class ItemRecord(NamedTuple):
    """One sequence's share of a step: `num_tokens` rows starting at position `start`."""

    seq_id: int
    phase: Phase
    """`decode` where only the last token had to be computed; `prefill` where more had to be: a prompt, or what a
    preemption dropped; `prefill_only` for a prefill-only request, which ends with this step."""
    start: int
    """The position of the first row: how many tokens the cache already held."""
    num_tokens: int
    """Rows of tokens that are part of the sequence."""
    remaining: int = 0
    """Known tokens that are still to be computed after this step: the rest of a prompt in chunks."""
    num_draft_tokens: int = 0
    """Further rows, for draft tokens: one for each, and one for each known token again in every further draft."""


class TokenRecord(NamedTuple):
    """One sampled token."""

    seq_id: int
    position: int
    """The token's position in its sequence, prompt included, counted from 0."""
    token_id: int
    text: str
    """The output text that is certain with this token: empty while a character is incomplete or a stop string may
    have begun; longer than the token's own text when such text turns out not to be one."""
    probability: float | None = None
    """The model's own probability of this token, where requested: softmax of the raw logits, before temperature and
    filters."""
    logprobs: tuple[tuple[int, float], ...] | None = None
    """The most probable tokens and their natural log probabilities, in descending order, where requested."""


@dataclass(frozen=True)
class Execution:
    """How a device launched a step's forward pass, if it has a choice."""

    mode: Literal["graph", "eager"]
    """`graph` replays a captured graph; `eager` launches kernel by kernel."""
    reason: str
    """Why, in a few words."""
    rows: int
    """Rows computed, padding included."""


@dataclass(frozen=True)
class FinishRecord:
    """A sequence ended."""

    seq_id: int
    reason: FinishReason
    text: str = ""
    """Output text that was held back until the end."""
    stop: str | int | None = None
    """The stop string or the token id that ended it."""
    error: str | None = None
    """The error's message if `reason` is `error`; None if it is not known."""
    by_request: bool = False
    """The error is of the request's own making, such as a grammar that needs too much work: it would come again."""
    why: PoolExhausted | None = None
    """Why the sequence ended before it had all the tokens that were asked for, where `reason` is `length`."""


@dataclass(frozen=True)
class AdmitRecord:
    """The scheduler admitted a sequence: it runs from this step on."""

    seq_id: int
    how: Literal["new", "recompute", "swap", "handoff"]
    """`new` for the first time, `handoff` with blocks that another engine computed; after a preemption, whether its
    tokens are computed again or swapped in."""
    num_cached: int
    """Tokens found in the cache, handed over, or swapped in from the host's pool."""
    num_blocks: int
    """Blocks allocated for it."""


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """A router's decision: the engine that a request went to, and the numbers that decided it."""

    request_id: str
    router: str
    replica: str
    why: str
    """`turn`, `fewer_requests`, `fewer_tokens`, `prefix`, `no_prefix`, `holder_busy`, or a router's own."""
    num_candidates: int
    load: int
    """Requests or tokens outstanding at the chosen replica, as the router counts."""
    least_load: int
    """The load of the least busy replica."""
    cached_tokens: int = 0
    """Tokens of the prompt that the chosen replica is known to have cached."""
    holder: str | None = None
    """The replica that has the longest prefix."""
    holder_tokens: int = 0
    """The length of that prefix."""
    holder_load: int = 0


@dataclass(frozen=True)
class WaitRecord:
    """A waiting sequence that the step left out, and why. The sequences behind it in the queue wait for it; a deferred
    sequence lets them pass."""

    seq_id: int
    reason: WaitReason


@dataclass(frozen=True)
class PreemptRecord:
    """The scheduler preempted a running sequence, because a sequence needed more blocks than were free."""

    seq_id: int
    """The victim."""
    victim_of: int
    """The sequence that needed the blocks; the victim itself where the policy chose the sequence that asked."""
    needed: int
    """Blocks that `victim_of` needed."""
    free: int
    """Blocks that were free."""
    preempt: str
    """The policy that chose the victim: `lifo`, `lifo-others`, `least-progressed`, `priority`."""
    preemption: PreemptionMode
    tokens_lost: int
    """Computed tokens that must be computed again; 0 where they were swapped out."""
    blocks_freed: int
    fallback: HostPoolFull | None = None
    """Why `preemption` is `recompute` although swapping was asked for."""


@dataclass(frozen=True)
class RejectRecord:
    """A request that was refused on arrival."""

    request_id: str
    message: str


@dataclass(frozen=True)
class ArriveRecord:
    """A request that was queued since the previous step."""

    request_id: str
    seq_ids: tuple[int, ...]
    """One for each sample. Those after the first begin when the prompt that they share has been computed."""
    num_prompt_tokens: int
    max_output_tokens: int
    arrived: float
    """Seconds on the engine's monotonic clock."""
    priority: int = 0


@dataclass(frozen=True)
class Queues:
    """The number of sequences in each state after a step."""

    waiting: int
    running: int
    swapped: int
    finished: int
    """Sequences that have ended since the engine was made."""


@dataclass(frozen=True)
class BlockSplit:
    """Copy-on-write: a sequence was about to write into a shared or cached block, so it got a copy of its own."""

    seq_id: int
    source: int
    destination: int
    references: int
    """The reference count of the source before the split, this sequence included. 1: the source stays cached."""


@dataclass(frozen=True)
class PrefixHit:
    """A sequence began with cached keys and values."""

    seq_id: int
    num_tokens: int
    """Cached tokens."""
    blocks: tuple[int, ...]
    """The blocks that hold them; the last may be filled in part."""


@dataclass(frozen=True)
class BlockEvicted:
    """A cached block without references was allocated for other tokens, and its content dropped."""

    block: int
    num_tokens: int
    """Tokens whose keys and values it held."""


CacheEvent = BlockSplit | PrefixHit | BlockEvicted


@dataclass(frozen=True)
class TableRecord:
    """One sequence's (or snapshot's) block table."""

    owner: int
    """The sequence's id, or the snapshot's."""
    is_snapshot: bool
    blocks: tuple[int, ...]
    """Physical blocks, in the order of the positions that they hold."""
    computed: int
    """Tokens whose keys and values are computed."""
    reserved: int
    """Token slots reserved, computed or not."""


@dataclass(frozen=True)
class BlockMap:
    """Every block of a cache's pool at one moment; the picture of the pool is drawn from it."""

    block_size: int
    tables: tuple[TableRecord, ...]
    """The tables in the order in which the sequences began, snapshots last."""
    reference_counts: tuple[int, ...]
    """`[num_blocks]`; 0 for a free block and for a cached one."""
    cached: tuple[int, ...]
    """Blocks without references whose content can still be hit, in the order of eviction."""
    written: tuple[int, ...] = ()
    """Blocks into which the step wrote."""


@dataclass(frozen=True)
class CacheRecord:
    """The cache after a step, before the blocks of sequences that ended in it are freed."""

    kind: str
    """`off`, `basic`, `paged` or `prefix`."""
    block_size: int
    num_blocks: int
    used_blocks: int
    """Blocks that a sequence or a snapshot refers to, filled or merely reserved."""
    tokens_held: int
    """Token slots that hold a computed key and value, shared ones counted once."""
    bytes_held: int
    """Bytes of those slots, all layers."""
    bytes_reserved: int
    """Bytes of the used blocks, all layers."""
    cached_blocks: int = 0
    """Blocks without references whose content can still be hit."""
    blocks_saved: int = 0
    """References beyond the first: the blocks that sequences would hold in addition if they shared none."""
    prefix_queries: int = 0
    """Prompt tokens looked up since the cache was made."""
    prefix_hits: int = 0
    """Looked-up prompt tokens that were found."""
    splits: int = 0
    """Copy-on-write copies since the cache was made."""
    evictions: int = 0
    """Cached blocks evicted since the cache was made."""

    @property
    def slots_reserved(self) -> int:
        """The number of token slots in the used blocks, each block counted once."""
        return self.used_blocks * self.block_size

    @property
    def free_blocks(self) -> int:
        """The number of blocks that are neither used nor cached."""
        return self.num_blocks - self.used_blocks - self.cached_blocks

    @property
    def utilization(self) -> float:
        """The share of all blocks that are used."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """The share of reserved slots that hold no computed key and value."""
        return 1 - self.tokens_held / self.slots_reserved if self.slots_reserved else 0.0

    @property
    def sharing(self) -> float:
        """The share of blocks that sharing saves, out of those that sequences would hold without it."""
        unshared = self.used_blocks + self.blocks_saved
        return self.blocks_saved / unshared if unshared else 0.0


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine."""

    step: int
    """Counted from 1."""
    items: tuple[ItemRecord, ...]
    tokens: tuple[TokenRecord, ...]
    finished: tuple[FinishRecord, ...]
    cache: CacheRecord
    schedule_ms: float
    """Until the forward began, without the time of proposers."""
    forward_ms: float
    """The model's forward passes alone, logits on the host included. With async scheduling on a device: the time to
    launch it, and the time that the host then waited for it."""
    sample_ms: float
    """Until all tokens were known. No time tells the commit, which follows."""
    started: float
    """Seconds on the engine's monotonic clock when the step began."""
    ended: float
    """The same clock when the step's tokens were known."""
    execution_class: ExecutionClass = "decode"
    queues: Queues = Queues(0, 0, 0, 0)
    admitted: tuple[AdmitRecord, ...] = ()
    waiting: tuple[WaitRecord, ...] = ()
    preempted: tuple[PreemptRecord, ...] = ()
    rejected: tuple[RejectRecord, ...] = ()
    arrived: tuple[ArriveRecord, ...] = ()
    block_table_entries: int = 0
    """Blocks in the tables of the step's sequences."""
    temporary_bytes: int = 0
    """About the size of the forward's own arrays, logits included; all are freed with the step."""
    events: tuple[CacheEvent, ...] = ()
    """Copy-on-write splits, hits and evictions of the step, in order."""
    blocks: BlockMap | None = None
    """The place of every block; None unless requested, because it is as long as the pool."""
    cycles: "tuple[SpecCycle, ...]" = ()
    """The draft tokens of each cycle, and their verification."""
    undrafted: "tuple[Undrafted, ...]" = ()
    """The sequences that were decoded without draft tokens although there are proposers, and why."""
    execution: Execution | None = None
    """How the forward was launched, on a device that may replay a captured graph."""
    planned_ahead: bool = False
    """Async scheduling: the step was planned and launched before the previous step's tokens were known. Its
    `schedule_ms` and its launch were spent while that step ran, before `started`."""
    discarded: int = 0
    """Wasted rows found with this step: rows planned ahead for sequences that had ended meanwhile."""
    replica: str = ""
    """The replica that took the step; empty if there is only one engine."""
    routes: tuple[RouteRecord, ...] = ()
    """Why the requests that arrived were routed to this engine."""

    @property
    def tokens_computed(self) -> int:
        """The number of rows that went through the model."""
        return sum([item.num_tokens + item.num_draft_tokens for item in self.items])

    @property
    def phase(self) -> Phase:
        """`decode` if every sequence in the step was decoding."""
        return "decode" if all(item.phase == "decode" for item in self.items) else "prefill"


class RequestTimes:
    """Durations in milliseconds between moments of a request; None if one of the two is not known."""

    arrived: float | None
    """Seconds on the engine's monotonic clock, as for the three below."""
    admitted: float | None
    """The time when it first began to run."""
    first_token: float | None
    last_token: float | None
    num_output_tokens: int

    @property
    def queue_ms(self) -> float | None:
        """The time from arrival to the first admission."""
        return _milliseconds(self.arrived, self.admitted)

    @property
    def time_to_first_token_ms(self) -> float | None:
        """The time from arrival to the first token."""
        return _milliseconds(self.arrived, self.first_token)

    @property
    def time_per_output_token_ms(self) -> float | None:
        """The mean time between tokens after the first; None with fewer than two."""
        total = _milliseconds(self.first_token, self.last_token)
        return total / (self.num_output_tokens - 1) if total and self.num_output_tokens > 1 else None

    @property
    def end_to_end_ms(self) -> float | None:
        """The time from arrival to the last token."""
        return _milliseconds(self.arrived, self.last_token)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The rate of tokens after the first, between the first and the last; None with fewer than two."""
        per_token = self.time_per_output_token_ms
        return 1e3 / per_token if per_token else None


def _milliseconds(begun: float | None, ended: float | None) -> float | None:
    return None if begun is None or ended is None else (ended - begun) * 1e3


@dataclass(frozen=True)
class RequestMetrics(RequestTimes):
    """The times and the work of one request: seconds on the engine's clock, durations in milliseconds."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrived: float
    """Seconds on the engine's monotonic clock, as for the two below."""
    first_token: float | None
    last_token: float | None
    forward_ms: tuple[float, ...] = ()
    """Milliseconds of each forward pass that this request took part in."""
    forward_tokens: tuple[int, ...] = ()
    """This request's rows in each of those passes, draft tokens included."""
    admitted: float | None = None
    """Seconds on the same clock when it first began to run."""
    times_preempted: int = 0
    tokens_recomputed: int = 0
    """Tokens that were computed before and had to be computed again."""
    tokens_cached: int = 0
    """Tokens that were found in the cache, at its first admission."""

    @property
    def tokens_computed(self) -> int:
        """The number of rows that went through the model for it."""
        return sum(self.forward_tokens)


@dataclass(frozen=True)
class EndRecord:
    """The end of a request, made of its output."""

    request_id: str
    reasons: tuple[FinishReason, ...]
    """Why each sample ended."""
    metrics: tuple[RequestMetrics, ...]
    """The metrics of each sample."""


@dataclass(frozen=True)
class TokenVerdict:
    """The target's decision on one proposed token."""

    token_id: int
    accepted: bool
    target_argmax: int
    """The target's argmax there, after the repetition penalty."""
    target_probability: float | None = None
    """The target's own probability of the proposed token, where requested: softmax of its raw logits."""
    p: float | None = None
    """The probability of the token in the target's filtered distribution, with the acceptance rule `rejection`; else
    None. With several drafts, in what the drafts before left of that distribution."""
    q: float | None = None
    """Its probability in the proposer's distribution, likewise."""
    draw: float | None = None
    """The number between 0 and 1 that decided; None if another draft's token had been accepted already."""


@dataclass(frozen=True)
class SpecDecision:
    """The draft length of a sequence in its next step, and why."""

    k: int
    """Draft tokens; 0 turns speculation off."""
    reason: SpecReason
    speed_up: float
    """The predicted speed-up with this `k`; for 0, with the best other one."""
    accept_rate: float | None
    """Accepted over proposed in the last 50 cycles; None before the first."""
    retry_in: int | None = None
    """While speculation is off: output tokens until it is tried again; None if it never is."""


class Undrafted(NamedTuple):
    """A sequence that a step decoded without draft tokens although there are proposers, and why.

    `measures`: plain steps come first, to know what one takes. `off`: draft tokens do not pay, as `decision` says.
    `no_proposal`: no proposer had one. `pauses`: none had one for a while, so none was asked. `no_room`: no block, or
    no token of the step's budget, was left for one. `last_token`: the sequence ends with this token. `not_wanted`: the
    request wants none, or its proposers are gone.
    """

    seq_id: int
    reason: UndraftedReason
    left: int | None = None
    """`measures`: plain steps to come, with this one. `off` and `pauses`: output tokens until it is tried again."""
    decision: SpecDecision | None = None
    """`off`: the decision that it follows."""


class CachedPositions(NamedTuple):
    """The cached positions of one sequence, in the cache of one model, over a cycle."""

    before: int
    written: int
    """Positions with all draft tokens that were computed."""
    after: int
    """Positions after the rollback: those of rejected draft tokens are dropped."""


@dataclass(frozen=True)
class SpecCycle:
    """One cycle of speculation for one sequence: what was proposed, the target's verdicts, and the cost."""

    seq_id: int
    proposer: str
    start: int
    """The position of the first proposed token."""
    proposed: tuple[int, ...]
    verdicts: tuple[TokenVerdict, ...]
    """The verdicts on the proposed tokens up to the first rejected one; the tokens after it are not verified."""
    emitted: tuple[int, ...]
    """The accepted tokens and the target's own one, up to the sequence's end."""
    draft_ms: float
    """This proposer's milliseconds, for all sequences of the step together."""
    target_ms: float
    """Milliseconds of the step's forward pass, for all its sequences together."""
    decision: SpecDecision | None = None
    """The decision that this cycle follows."""
    then: SpecDecision | None = None
    """The decision for the next cycle."""
    won: bool = True
    """Whether the emitted tokens are this proposer's. Of several proposers for one sequence, one wins."""
    error: str | None = None
    """The error that ended the cycle before it was verified, such as a revoked lease."""
    release_ms: float | None = None
    """Milliseconds from the revocation of that lease to the release of the leased model."""
    draft_cached: tuple[int, int] | None = None
    """Positions in the draft's own cache before it proposed and after; None for a proposer without one."""

    @property
    def target_positions(self) -> CachedPositions:
        """The positions of the target's cache, or of its fork, which is dropped if another proposer won."""
        after = self.start - 1 + len(self.emitted) if self.won else self.start - 1
        return CachedPositions(self.start - 1, self.start + len(self.proposed), after)

    @property
    def draft_positions(self) -> CachedPositions | None:
        """The positions of the draft's cache, which is rolled back at its next proposal."""
        if self.draft_cached is None:
            return None
        before, written = self.draft_cached
        return CachedPositions(before, written, min(written, self.start + self.num_accepted))

    @property
    def num_proposed(self) -> int:
        """The number of proposed tokens."""
        return len(self.proposed)

    @property
    def num_accepted(self) -> int:
        """The number of accepted tokens."""
        return sum(verdict.accepted for verdict in self.verdicts)

    @property
    def num_emitted(self) -> int:
        """The number of tokens that the sequence got from this cycle."""
        return len(self.emitted)

    def in_numbers(self, step: int) -> "DraftCycle":
        """Return the cycle of this step without its tokens."""
        return DraftCycle(step, *[getattr(self, name) for name in _CYCLE_NUMBERS])


@dataclass(frozen=True, slots=True)
class DraftCycle:
    """A `SpecCycle` in numbers, for a timeline, which keeps all of them."""

    step: int
    proposer: str
    num_proposed: int
    num_accepted: int
    num_emitted: int
    won: bool
    target_positions: CachedPositions
    draft_positions: CachedPositions | None


_CYCLE_NUMBERS = [field.name for field in fields(DraftCycle)][1:]
