"""Requests that want one answer and keep nothing: they hold resources for one step and not for a decode life.

A judge, a router, a classifier, a reranker or an embedder reads a prompt and returns something of fixed size. Served as
a generation, each takes a place among the running sequences and blocks for its whole prompt, and waits for both. Here
it is what it is: some rows of one forward pass. Its keys and values lie in *scratch blocks* past the pool, which mean
nothing once the step is over; only a prefix that others want too is computed into blocks of the pool, and published.

`OneShotQueue` decides which of the waiting requests a step takes. Like the scheduler it touches no model and no array.

Prefix-aware planning: before anything is allocated, each request is looked up in the prefix index. Of several that
begin with the same blocks, not yet cached, the first becomes the *leader* and computes them; the others wait one step
and then compute only what is their own. A leader that is aborted has led nobody: the next step finds another.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from forge.cache.kv_cache import NO_HIT, Hit, KvCache
from forge.engine.sampling_params import SamplingParams
from forge.engine.step_plan import PlanItem
from forge.trace.records import Deferred, NoBudget, Pooling, WaitRecord

MAX_SEEN = 4096
"""Block keys that are remembered of requests which published nothing."""
MAX_DEFERRALS = 8
"""Steps that a request waits for leaders at most; then it computes for itself what others may be computing too."""


@dataclass(frozen=True)
class OneShotTask:
    """What is wanted of one forward pass over a prompt. Fields that are not set cost nothing."""

    sample: bool = False
    """One token, chosen as the request's sampling parameters say."""
    candidates: tuple[int, ...] = ()
    """Log probabilities of these tokens to come next."""
    score_from: int | None = None
    """Log probabilities of the prompt's own tokens from this position on (at least 1), each given those before it."""
    top: int = 0
    """With each of those the likeliest alternatives, this many."""
    pooling: Pooling | None = None
    """An embedding: the last hidden state, or the mean of all. Not together with any other field."""

    @property
    def head(self) -> str:
        """Which forward pass it needs: requests that share one can share a batch."""
        return "hidden" if self.pooling is not None else "logits"

    def logit_rows(self, start: int, length: int) -> range:
        """The rows, counted from `start`, whose results the task needs."""
        if self.pooling == "mean":
            return range(length - start)
        last = length if self.sample or self.candidates or self.pooling else length - 1
        first = length - 1 if self.score_from is None else min(length - 1, self.score_from - 1)
        return range(first - start, max(first, last) - start)

    def most_cached(self, length: int) -> int:
        """How many tokens may come from the cache: those before the first row that is needed."""
        return self.logit_rows(0, length).start


@dataclass(frozen=True)
class OneShotRequest:
    """A request as it was admitted, prepared once and never changed."""

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]
    task: OneShotTask
    params: SamplingParams
    seed: int
    salt: str = ""
    prompt: str | None = None
    """Its text, where it was given as one."""
    arrived: float = 0.0
    """Seconds on the engine's clock."""


@dataclass(frozen=True)
class OneShotItem:
    """A request's share of a step."""

    request: OneShotRequest
    item: PlanItem
    num_published: int
    """Tokens, from the first on, whose keys and values are in blocks of the pool when the step is over."""


@dataclass
class _Waiting:
    request: OneShotRequest
    keys: tuple[int, ...]
    """What its full blocks are known by in the prefix index, as far as they may come from there."""
    deferrals: int = 0

    def key_after(self, num_blocks: int) -> int | None:
        """The key of the block behind so many; None if there is no such block."""
        return self.keys[num_blocks] if num_blocks < len(self.keys) else None


@dataclass
class OneShotBudget:
    """What a step has left for requests of this kind."""

    tokens: int
    temporary_bytes: int
    blocks: int
    """Blocks of the pool, for prefixes that are published."""
    scratch: list[int] = field(default_factory=list)
    """Free scratch blocks."""


class OneShotQueue:
    """Waiting requests, in the order of arrival, until the step that answers them is committed."""

    def __init__(self, cache: KvCache, bytes_of: Callable[[int, int], int], planning: bool = True):
        """`bytes_of`: temporary bytes of a forward with so many rows, so many of them with logits. `planning`: whether
        requests share what they begin with; without it each is computed whole."""
        self.cache = cache
        self.planning = planning
        self._bytes_of = bytes_of
        self._waiting: dict[int, _Waiting] = {}
        self._beginnings: Counter[int] = Counter()
        """Of each block key, how many waiting requests begin with it."""
        self._seen: dict[int, None] = {}
        """Block keys that requests began with, the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: OneShotRequest) -> None:
        cacheable = request.task.most_cached(len(request.token_ids)) if self.planning else 0
        keys = self.cache.prefix_keys(request.token_ids[:cacheable], request.salt)
        self._waiting[request.seq_id] = _Waiting(request, keys)
        self._beginnings.update(keys)

    def remove(self, seq_id: int) -> OneShotRequest | None:
        """Forget a request that was answered or aborted; None if it is not here."""
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return None
        for key in waiting.keys:
            self._beginnings[key] -= 1
            if not self._beginnings[key]:
                del self._beginnings[key]
        return waiting.request

    def plan(
        self, budget: OneShotBudget, leaders: dict[int, int]
    ) -> tuple[tuple[OneShotItem, ...], tuple[WaitRecord, ...]]:
        """Choose requests for one step, and attach what the cache has of them until `finish`.

        `leaders`: for each block key that this step computes, the sequence that computes it; grows by what is chosen.
        At least one goes, however large: requests of this kind have an account of their own, and starve beside no one.
        """
        items: list[OneShotItem] = []
        waits: list[WaitRecord] = []
        for waiting in list(self._waiting.values()):
            request = waiting.request
            hit = self._whole_blocks(waiting, budget.blocks)
            leader = leaders.get(waiting.key_after(len(hit.blocks)))
            if leader is not None and waiting.deferrals < MAX_DEFERRALS:
                waiting.deferrals += 1
                shared = sum(leaders.get(key) == leader for key in waiting.keys) * self.cache.block_size
                waits.append(WaitRecord(request.seq_id, Deferred(leader, shared)))
                continue
            length = len(request.token_ids)
            rows = length - hit.num_tokens
            logit_rows = request.task.logit_rows(hit.num_tokens, length)
            cost = self._bytes_of(rows, len(logit_rows) if request.task.head == "logits" else 0)
            too_large = rows > budget.tokens or cost > budget.temporary_bytes
            if (items and too_large) or -(-rows // self.cache.block_size) > len(budget.scratch):
                waits.append(WaitRecord(request.seq_id, NoBudget(budget.tokens)))
                break
            budget.tokens -= rows
            budget.temporary_bytes -= cost
            items.append(self._attach(waiting, hit, logit_rows, budget, leaders))
        return tuple(items), tuple(waits)

    def finish(self, items: tuple[OneShotItem, ...], broken: frozenset[int] = frozenset()) -> None:
        """The step has computed them: publish what is to be published, and let everything go. Of those that are
        `broken`, by sequence id, nothing may serve anybody else."""
        for one in items:
            request = one.request
            if request.seq_id in self.cache:
                computed = self.cache.computed_length(request.seq_id)
                if one.num_published > computed and request.seq_id not in broken:
                    self.cache.commit(request.seq_id, request.token_ids[computed : one.num_published])
                self.cache.remove(request.seq_id)
            waiting = self._waiting.get(request.seq_id)
            if waiting is not None:
                self._remember(waiting.keys)
            self.remove(request.seq_id)

    def requests(self) -> Iterator[OneShotRequest]:
        return (waiting.request for waiting in self._waiting.values())

    def _whole_blocks(self, waiting: _Waiting, available: int) -> Hit:
        """Whole blocks of the prompt that the cache has, if holding them leaves enough to others. A part of a block
        would have to be copied for one step's use."""
        if not waiting.keys:
            return NO_HIT
        request, size = waiting.request, self.cache.block_size
        hit = self.cache.lookup(request.token_ids, request.salt, len(waiting.keys) * size)
        if hit.num_tokens % size:
            hit = self.cache.lookup(request.token_ids, request.salt, hit.num_tokens // size * size)
        return hit if self.cache.blocks_to_begin(hit, hit.num_tokens) <= available else NO_HIT

    def _attach(
        self, waiting: _Waiting, hit: Hit, logit_rows: range, budget: OneShotBudget, leaders: dict[int, int]
    ) -> OneShotItem:
        """Give a request its blocks: those of the cache, those that it publishes, and scratch for the rest."""
        request, cache, size = waiting.request, self.cache, self.cache.block_size
        boundary = max(len(hit.blocks), self._boundary(waiting)) * size
        if cache.blocks_to_begin(hit, boundary) > budget.blocks:
            boundary = hit.num_tokens
        table: tuple[int, ...] = ()
        if boundary:
            budget.blocks -= cache.blocks_to_begin(hit, boundary)
            cache.add(request.seq_id, request.token_ids, request.salt, hit.num_tokens)
            cache.reserve(request.seq_id, boundary - hit.num_tokens)
            table = cache.block_table(request.seq_id)
            for key in waiting.keys[len(hit.blocks) : len(table)]:
                leaders.setdefault(key, request.seq_id)
        start, length = hit.num_tokens, len(request.token_ids)
        missing = -(-length // size) - len(table)
        table += tuple([budget.scratch.pop() for _ in range(missing)])
        item = PlanItem(request.seq_id, start, length - start, logit_rows, False, "oneshot", table)
        return OneShotItem(request, item, boundary)

    def _boundary(self, waiting: _Waiting) -> int:
        """How many blocks, from the first on, are worth publishing: those that another waiting request begins with too,
        or that an earlier one began with."""
        return sum(1 for _ in takewhile(self._is_wanted, waiting.keys))

    def _is_wanted(self, key: int) -> bool:
        return key in self._seen or self._beginnings[key] > 1

    def _remember(self, keys: tuple[int, ...]) -> None:
        """These beginnings have been seen once: if they come again they are worth keeping."""
        for key in keys:
            self._seen[key] = None
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
