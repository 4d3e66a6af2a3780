"""What happened, as plain data: one `StepRecord` per engine step, and the metrics that follow from them.

Everything that is shown, recorded, replayed or served is made from these values. They hold no arrays, no objects of the
engine and no text for people, so anyone may import them, and writing one as JSON loses nothing.
"""

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal, NamedTuple

Phase = Literal["prefill", "decode", "oneshot"]
Pooling = Literal["last", "mean"]
ExecutionClass = Literal["oneshot", "mixed", "decode"]
FinishReason = Literal["stop", "length", "abort", "error"]
PreemptionMode = Literal["recompute", "swap"]


class ItemRecord(NamedTuple):
    """One sequence's share of a step: `num_tokens` rows starting at position `start`."""

    seq_id: int
    phase: Phase
    """`decode` where all but the last token were there before; `prefill` where more than that had to be computed, a
    prompt or what a preemption dropped; `oneshot` for a request that this step answers and forgets."""
    start: int
    """The position of the first row: how many tokens the cache already held."""
    num_tokens: int
    """Rows computed of tokens that stand."""
    remaining: int = 0
    """Known tokens that are still to be computed after this step: a prompt that came in chunks."""
    num_guesses: int = 0
    """Further rows, each of which verified a guess or stood before one in another run of guesses."""


class TokenRecord(NamedTuple):
    """One sampled token."""

    seq_id: int
    position: int
    """Where the token stands in its sequence, prompt included, counted from 0."""
    token_id: int
    text: str
    """What this token made certain of the output text: empty while a character is incomplete or a stop string may
    be beginning, longer than the token's own text once one turns out not to."""
    probability: float | None = None
    """The model's own probability of this token, where it was asked for: softmax of the raw logits, before temperature
    and filters."""
    logprobs: tuple[tuple[int, float], ...] | None = None
    """The likeliest tokens and their natural log probabilities, likeliest first, where they were asked for."""


@dataclass(frozen=True)
class Execution:
    """How a device launched a step's forward pass, where it has a choice."""

    mode: Literal["graph", "eager"]
    """All launches at once, recorded earlier, or one by one."""
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
    """Which stop string, or which token id, ended it."""
    error: str | None = None
    """What went wrong, where `reason` is `error` and it is known."""


@dataclass(frozen=True)
class NoBlocks:
    """Too few blocks for all of the sequence's tokens, after what running sequences need in this step."""

    needed: int
    free: int


@dataclass(frozen=True)
class MaxNumSeqs:
    """As many sequences run as may."""

    limit: int


@dataclass(frozen=True)
class NoBudget:
    """The step's tokens are all given to sequences before this one."""

    limit: int
    """Tokens that a step may compute."""


@dataclass(frozen=True)
class HostPoolFull:
    """Too few blocks in the host's pool to swap to."""

    needed: int
    free: int


@dataclass(frozen=True)
class Deferred:
    """Another sequence computes blocks that this one begins with too: next step they are there."""

    leader: int
    num_tokens: int
    """Tokens that need not be computed twice."""


WaitReason = NoBlocks | MaxNumSeqs | NoBudget | Deferred


@dataclass(frozen=True)
class AdmitRecord:
    """A sequence began to run with this step."""

    seq_id: int
    how: Literal["new", "recompute", "swap"]
    """For the first time, or again after a preemption."""
    num_cached: int
    """Tokens that were in the cache already, or came back from the host's pool."""
    num_blocks: int
    """Blocks that it took."""


@dataclass(frozen=True)
class WaitRecord:
    """A sequence that the step left out, and why. Those behind it in the queue wait for it, unless it is deferred: then
    they may pass."""

    seq_id: int
    reason: WaitReason


@dataclass(frozen=True)
class PreemptRecord:
    """A running sequence lost its blocks to another."""

    seq_id: int
    victim_of: int
    """The sequence that needed blocks; the same where it had the worst place of all itself."""
    needed: int
    """Blocks that that one needed."""
    free: int
    """Blocks that there were."""
    policy: str
    """How the victim was chosen: `lifo`, `least-progressed`, `priority`."""
    mode: PreemptionMode
    tokens_lost: int
    """Computed tokens that must be computed again; 0 where they were swapped."""
    blocks_freed: int
    fallback: HostPoolFull | None = None
    """Why it was recomputed although swapping was asked for."""


@dataclass(frozen=True)
class RejectRecord:
    """A request that was refused when it came."""

    request_id: str
    message: str


@dataclass(frozen=True)
class ArriveRecord:
    """A request that was put in the queue since the step before."""

    request_id: str
    seq_ids: tuple[int, ...]
    """Its samples. Those after the first begin when the prompt that they share has been computed."""
    num_prompt_tokens: int
    max_output_tokens: int
    arrived: float
    """Seconds on the engine's monotonic clock."""
    priority: int = 0


@dataclass(frozen=True)
class Queues:
    """How many sequences are where after a step."""

    waiting: int
    running: int
    swapped: int
    finished: int
    """All that have ended since the engine was made."""


@dataclass(frozen=True)
class BlockSplit:
    """A sequence was about to write into a block that others also refer to, so it got a copy of its own."""

    seq_id: int
    source: int
    destination: int
    references: int
    """How many referred to the source, this sequence included, before the split."""


@dataclass(frozen=True)
class PrefixHit:
    """A sequence began with keys and values that were there already."""

    seq_id: int
    num_tokens: int
    """Tokens that need no computing."""
    blocks: tuple[int, ...]
    """The blocks that hold them; the last may be filled in part."""


@dataclass(frozen=True)
class BlockEvicted:
    """A block that nobody referred to was taken for something else, and its content forgotten."""

    block: int
    num_tokens: int
    """Tokens whose keys and values were in it."""


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
    """Tokens whose keys and values are there."""
    reserved: int
    """Token slots owned, computed or not."""


@dataclass(frozen=True)
class BlockMap:
    """Every block of a cache's pool at one moment: what the picture of the pool is drawn from."""

    block_size: int
    tables: tuple[TableRecord, ...]
    """In the order in which the sequences began, snapshots last."""
    reference_counts: tuple[int, ...]
    """`[num_blocks]`; 0 for a free block and for a cached one."""
    cached: tuple[int, ...]
    """Blocks that nobody refers to and whose content can still be hit, in the order in which they will be evicted."""
    written: tuple[int, ...] = ()
    """Blocks into which the step wrote."""


@dataclass(frozen=True)
class CacheRecord:
    """The cache after a step, before sequences that ended in it gave back what they held."""

    kind: str
    """`off`, `basic`, `paged` or `prefix`."""
    block_size: int
    num_blocks: int
    used_blocks: int
    """Blocks that belong to some sequence, whether filled or merely reserved."""
    tokens_held: int
    """Token slots that hold a computed key and value."""
    bytes_held: int
    """Bytes of those slots, all layers."""
    bytes_reserved: int
    """Bytes of the used blocks, all layers."""
    cached_blocks: int = 0
    """Blocks that nobody refers to and whose content can still be hit."""
    slots_reserved: int = 0
    """Token slots in the used blocks, each block counted once."""
    slots_filled: int = 0
    """Of those, the ones that hold a computed key and value, shared ones counted once."""
    blocks_saved: int = 0
    """References beyond the first: blocks that sequences would hold more if they shared none."""
    prefix_queries: int = 0
    """Tokens of all prompts that were looked up since the cache was made."""
    prefix_hits: int = 0
    """Of those, the tokens that were found."""
    splits: int = 0
    """Copy-on-write copies since the cache was made."""
    evictions: int = 0
    """Cached blocks taken for something else since the cache was made."""

    @property
    def free_blocks(self) -> int:
        """Blocks with nothing in them."""
        return self.num_blocks - self.used_blocks - self.cached_blocks

    @property
    def utilization(self) -> float:
        """The share of all blocks that belong to some sequence."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """The share of reserved slots with nothing in them."""
        return 1 - self.slots_filled / self.slots_reserved if self.slots_reserved else 0.0

    @property
    def sharing(self) -> float:
        """The share of blocks that sharing saves: of those that sequences would hold without it."""
        unshared = self.used_blocks + self.blocks_saved
        return self.blocks_saved / unshared if unshared else 0.0


@dataclass(frozen=True)
class StepRecord:
    """One turn of the engine's loop."""

    step: int
    """Counted from 1."""
    items: tuple[ItemRecord, ...]
    tokens: tuple[TokenRecord, ...]
    finished: tuple[FinishRecord, ...]
    cache: CacheRecord
    schedule_ms: float
    forward_ms: float
    """The model's forward pass alone, logits on the host included. On a device that computes while the host does
    something else: what it took to launch it, and what the host then waited for it."""
    sample_ms: float
    started: float
    """Seconds on the engine's monotonic clock when the step began."""
    ended: float
    """The same clock when the step's tokens existed."""
    execution_class: ExecutionClass = "decode"
    queues: Queues = Queues(0, 0, 0, 0)
    admitted: tuple[AdmitRecord, ...] = ()
    waiting: tuple[WaitRecord, ...] = ()
    preempted: tuple[PreemptRecord, ...] = ()
    rejected: tuple[RejectRecord, ...] = ()
    arrived: tuple[ArriveRecord, ...] = ()
    block_table_entries: int = 0
    """Blocks in the tables of the sequences that took part."""
    temporary_bytes: int = 0
    """About what the forward's own arrays took, logits included: nothing of it outlives the step."""
    events: tuple[CacheEvent, ...] = ()
    """What the step changed in the cache beyond growing it, in order."""
    blocks: BlockMap | None = None
    """Where every block is; only where it was asked for, because it is as long as the pool."""
    cycles: "tuple[SpecCycle, ...]" = ()
    """What was guessed, and what became of it."""
    execution: Execution | None = None
    """How the forward was launched, on a device that may replay a captured graph."""
    planned_ahead: bool = False
    """Whether it was planned and launched before the tokens of the step before it were known: its `schedule_ms` and its
    launch were spent while that one ran, before `started`."""
    discarded: int = 0
    """Rows computed in vain that came to light with this step: those of sequences that had ended when the step planned
    ahead for them was to be read."""

    @property
    def tokens_computed(self) -> int:
        """Rows that went through the model."""
        return sum([item.num_tokens + item.num_guesses for item in self.items])

    @property
    def prefill_tokens(self) -> int:
        """Rows of prompts, of either class."""
        return sum(item.num_tokens for item in self.items if item.phase != "decode")

    @property
    def decode_tokens(self) -> int:
        """Rows of sequences that were only extended."""
        return sum(item.num_tokens for item in self.items if item.phase == "decode")

    @property
    def phase(self) -> Phase:
        """`decode` if every sequence in the step was decoding."""
        return "decode" if all(item.phase == "decode" for item in self.items) else "prefill"


@dataclass(frozen=True)
class RequestMetrics:
    """One request's times and work. Milliseconds throughout."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrived: float
    """Seconds on the engine's monotonic clock, as for the two below."""
    first_token: float | None
    last_token: float | None
    forward_ms: tuple[float, ...] = field(default=())
    """Each forward pass that this request took part in."""
    forward_tokens: tuple[int, ...] = field(default=())
    """Rows that this request had in each of them."""
    admitted: float | None = None
    """Seconds on the same clock when it first began to run."""
    times_preempted: int = 0
    tokens_recomputed: int = 0
    """Tokens that were computed before and had to be computed again."""
    tokens_cached: int = 0
    """Tokens that were found in the cache, at its first admission."""

    @property
    def queue_ms(self) -> float | None:
        """From arrival to the first admission; None if it never ran."""
        return None if self.admitted is None else (self.admitted - self.arrived) * 1e3

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Between one token and the next, on average, after the first; None with fewer than two."""
        rate = self.decode_tokens_per_second
        return None if rate is None else 1e3 / rate

    @property
    def end_to_end_ms(self) -> float | None:
        """From arrival to the last token; None if it produced none."""
        return None if self.last_token is None else (self.last_token - self.arrived) * 1e3

    @property
    def time_to_first_token_ms(self) -> float | None:
        """From the request's arrival to its first token; None if it produced none."""
        return None if self.first_token is None else (self.first_token - self.arrived) * 1e3

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first per second between the first and the last; None with fewer than two."""
        if self.first_token is None or self.num_output_tokens < 2 or self.last_token == self.first_token:
            return None
        return (self.num_output_tokens - 1) / (self.last_token - self.first_token)

    @property
    def tokens_computed(self) -> int:
        return sum(self.forward_tokens)


@dataclass(frozen=True)
class EndRecord:
    """A request whose samples have all ended. Whoever ran it makes this record of its output."""

    request_id: str
    reasons: tuple[FinishReason, ...]
    """Why each sample ended."""
    metrics: tuple[RequestMetrics, ...]
    """What each sample cost."""


@dataclass(frozen=True)
class Spread:
    """Five numbers that describe a list of milliseconds."""

    minimum: float
    median: float
    maximum: float
    mean: float
    count: int

    @classmethod
    def of(cls, values: tuple[float, ...] | list[float]) -> "Spread":
        """Raises ValueError for an empty list."""
        return cls(min(values), median(values), max(values), fmean(values), len(values))


@dataclass(frozen=True)
class TokenVerdict:
    """What the target made of one proposed token."""

    token_id: int
    accepted: bool
    target_argmax: int
    """The target's likeliest token there, after the repetition penalty."""
    target_probability: float | None = None
    """The target's own probability of the proposed token, where it was asked for: softmax of its raw logits."""
    p: float | None = None
    """With the acceptance rule `rejection`: how likely the target's filtered distribution draws the token, else None.
    With several drafts, of what those before left of that distribution."""
    q: float | None = None
    """The same of the proposer's distribution."""
    draw: float | None = None
    """The number between 0 and 1 that decided; None if another draft's token had been accepted already."""


SpecReason = Literal["fixed", "wins", "turned_down", "loses", "waits", "probes", "on_again", "cannot_win"]


@dataclass(frozen=True)
class SpecDecision:
    """How many tokens to propose for a sequence in its next step, and why."""

    k: int
    """0 is off."""
    reason: SpecReason
    speed_up: float
    """What the formula predicts for this `k`; for 0 what it predicts for the best other one."""
    accept_rate: float | None
    """Accepted over proposed in the last 50 cycles; None before the first."""
    retry_in: int | None = None
    """While it is off: output tokens until it is tried again; None if it never is."""


@dataclass(frozen=True)
class SpecCycle:
    """One turn of speculation for one sequence: what was proposed, what the target made of it, what it cost."""

    seq_id: int
    proposer: str
    start: int
    """The position of the first proposed token."""
    proposed: tuple[int, ...]
    verdicts: tuple[TokenVerdict, ...]
    """Of the proposed tokens up to the first that was rejected: those behind it were not looked at."""
    emitted: tuple[int, ...]
    """The accepted tokens and the target's own one, as far as the sequence did not end before."""
    draft_ms: float
    """This proposer's time, for all sequences of the step together."""
    target_ms: float
    """The step's forward pass, for all its sequences together."""
    decision: SpecDecision | None = None
    """Why so many were proposed."""
    then: SpecDecision | None = None
    """What was decided for the next cycle."""
    won: bool = True
    """Whether what was emitted is this proposer's run. Of several that guess for one sequence, one wins."""
    error: str | None = None
    """What ended the cycle before it was verified, such as a revoked lease."""
    release_ms: float | None = None
    """Milliseconds from the revocation of that lease to the release of what was lent."""

    @property
    def num_accepted(self) -> int:
        return sum(verdict.accepted for verdict in self.verdicts)
