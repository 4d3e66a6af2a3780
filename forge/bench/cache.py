"""`forge bench cache`: paged against contiguous in the same run, and what keeping a prefix saves.

One model is loaded once and served by several engines, which differ in their cache alone and take turns, a step of one
and a step of the next, so that whatever else the machine does meets them alike. A ratio is taken step by step, and its
median is shown. What no model is needed for (how long the policy itself takes, what is reserved and stays empty)
is measured on the caches alone.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from forge.bench.results import Middle
from forge.cache.basic import BasicKvCache
from forge.cache.block_pool import BlockPool
from forge.cache.kv_cache import KvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.engine.engine import Engine
    from forge.llm import LLM

LENGTHS = (128, 1024)
BLOCK_SIZES = (1, 16, 64)
DEFAULT_BLOCK_SIZE = 16
BOOKKEEPING_SEQUENCES = 64
BOOKKEEPING_LENGTH = 500
PROMPT_TOKENS = 512
HIT_SHARE = 0.9
WASTE_SEQUENCES = 64
WASTE_MAX_LEN = 2048
RUBRIC_TOKENS, RUBRIC_REQUESTS, QUESTION_TOKENS = 200, 32, 30
SEED = 1

Progress = Callable[[str], None]
"""Called with what is about to be done."""


@dataclass(frozen=True)
class Effort:
    """How long a run measures."""

    steps: int = 60
    """Of each engine, for each figure."""
    rounds: int = 5
    """Prompts of each engine, for the time to the first token."""
    policy_steps: int = 300

    @classmethod
    def quick(cls) -> "Effort":
        """Enough to see that everything runs; too little to believe."""
        return cls(steps=6, rounds=2, policy_steps=20)


@dataclass(frozen=True)
class StepTime:
    """One decode step of one sequence, everything in it: scheduling, the forward pass, choosing a token."""

    length: int
    """Tokens in the cache when the first step began."""
    block_size: int
    basic: Middle
    """Seconds, as for the others; what is low and high are quartiles, here and below."""
    paged: Middle
    """In a fresh pool, whose blocks are handed out in order."""
    scattered: Middle
    """In a pool whose blocks are handed out in no order, as after a long time."""
    ratio: Middle
    """Paged over contiguous, step by step: above 1 it costs more."""
    scattered_ratio: Middle


@dataclass(frozen=True)
class FirstToken:
    """A prompt whose beginning is in the cache, beside the same prompt computed whole."""

    prompt_tokens: int
    cached_tokens: int
    paged: Middle
    """Seconds to the first token with nothing cached."""
    prefix: Middle
    ratio: Middle
    """How many times sooner it comes, prompt by prompt."""


@dataclass(frozen=True)
class Bookkeeping:
    """What a cache's policy takes of one decode step with many sequences.

    blocks_needed, reserve, block_table and commit for each, then the statistics and the events.
    """

    kind: str
    sequences: int
    seconds: Middle


@dataclass(frozen=True)
class AllocatorSpeed:
    """How fast one way to allocate blocks is."""

    name: str
    operations_per_second: float


@dataclass(frozen=True)
class Waste:
    """What a cache reserves for the same sequences."""

    kind: str
    block_size: int
    bytes_reserved: int
    bytes_filled: int

    @property
    def wasted(self) -> float:
        """The share of what is reserved that is empty."""
        return 1 - self.bytes_filled / self.bytes_reserved


@dataclass(frozen=True)
class HitRate:
    """Requests that begin with the same tokens, one after another."""

    block_size: int
    prompt_tokens: int
    tokens_found: int

    @property
    def share(self) -> float:
        return self.tokens_found / self.prompt_tokens


@dataclass(frozen=True)
class CacheBenchmark:
    """The results of `forge bench cache`."""

    model: str
    device: str
    machine: str
    steps: int
    step_times: tuple[StepTime, ...]
    skipped: tuple[str, ...]
    first_token: FirstToken | None
    bookkeeping: tuple[Bookkeeping, ...]
    allocator: tuple[AllocatorSpeed, ...]
    waste: tuple[Waste, ...]
    hit_rates: tuple[HitRate, ...]


def run(
    model: str,
    lengths: Sequence[int] = LENGTHS,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    device: str | None = None,
    threads: int | None = None,
    effort: Effort = Effort(),
    on_progress: Progress = lambda text: None,
    machine: str = "",
) -> CacheBenchmark:
    """Measure. A length that the model's context does not hold is left out, and said to be.

    Raises `UsageError` for a model that does not exist, or a length or size of block that is none.
    """
    from forge.llm import LLM

    for name, values in (("--length", lengths), ("--block-size", block_sizes), ("--reps", [effort.steps])):
        if not values or min(values) < 1:
            raise UsageError(f"{name} is at least 1")
    on_progress(f"load {model}")
    chosen: dict[str, Any] = {
        name: value for name, value in (("device", device), ("threads", threads)) if value is not None
    }
    llm = LLM(model, kv="paged", num_blocks=1, **chosen)  # its own cache is not used
    fitting = [length for length in lengths if length + effort.steps + 2 <= llm.max_model_len]
    times = []
    for length in fitting:
        for block_size in block_sizes:
            on_progress(f"decode at {length:,} tokens, blocks of {block_size}")
            times.append(_step_time(llm, length, block_size, effort.steps))
    on_progress("time to first token with a prefix that is there")
    first_token = _first_token(llm, effort.rounds) if llm.max_model_len >= PROMPT_TOKENS + 2 else None
    on_progress("the policies alone")
    bytes_per_token = llm.kv_layout.bytes_per_token
    return CacheBenchmark(
        llm.model_name,
        f"{llm.device} ({llm.device_description})",
        machine,
        effort.steps,
        tuple(times),
        tuple(f"{length:,} tokens do not fit the model's context" for length in lengths if length not in fitting),
        first_token,
        tuple(bookkeeping(cache, effort.policy_steps) for cache in _bookkept()),
        allocator_speeds(effort.policy_steps),
        tuple(waste(cache, bytes_per_token) for cache in _wasteful(block_sizes)),
        tuple(hit_rate(block_size) for block_size in block_sizes),
    )


def _step_time(llm: "LLM", length: int, block_size: int, steps: int) -> StepTime:
    """Decode steps of all three in turn, from the same prompt on."""
    longest = length + steps + 2
    blocks = -(-longest // block_size)
    rng = random.Random(SEED)
    prompt = [rng.randrange(llm.model.vocab_size) for _ in range(length)]
    engines = [
        _engine(llm, BasicKvCache(1, longest, block_size), longest),
        _engine(llm, PagedKvCache(2 * blocks, block_size), longest),
        _engine(llm, _scattered(PagedKvCache(2 * blocks, block_size)), longest),
    ]
    for engine in engines:
        _begin(engine, prompt, steps + 2)
        while not engine.step().tokens:
            pass
        engine.step()  # the first decode after a prefill finds nothing of the weights in the processor's cache
    seconds: list[list[float]] = [[], [], []]
    for turn in range(steps):
        for which in (0, 1, 2) if turn % 2 else (2, 1, 0):
            started = time.perf_counter()
            engines[which].step()
            seconds[which].append(time.perf_counter() - started)
    ratios = (_ratio(seconds[1], seconds[0]), _ratio(seconds[2], seconds[0]))
    basic, paged, scattered = map(_middle, seconds)
    return StepTime(length, block_size, basic, paged, scattered, *ratios)


def _middle(values: Sequence[float]) -> Middle:
    """The median and the quartiles: a step in the middle of which the system did something else says nothing."""
    if len(values) < 2:
        return Middle.of(values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Middle(middle, low, high, len(values))


def _ratio(values: Sequence[float], others: Sequence[float]) -> Middle:
    return _middle([value / other for value, other in zip(values, others, strict=True)])


def _scattered(cache: PagedKvCache) -> PagedKvCache:
    """The same cache with a free list out of order: neighbours are no longer neighbours."""
    order = list(cache.pool.allocate(len(cache.pool.free)))
    random.Random(SEED).shuffle(order)
    for block in order:
        cache.pool.decref(block)
    return cache


def _first_token(llm: "LLM", rounds: int) -> FirstToken:
    """Prompts that begin alike and end differently, once through each engine in turn."""
    size, longest = DEFAULT_BLOCK_SIZE, PROMPT_TOKENS + 2
    shared = -(-round(PROMPT_TOKENS * HIT_SHARE) // size) * size
    blocks = 4 * -(-longest // size)
    rng = random.Random(SEED)
    beginning = [rng.randrange(llm.model.vocab_size) for _ in range(shared)]
    paged, prefix = (_engine(llm, kind(blocks, size), longest) for kind in (PagedKvCache, PrefixKvCache))
    seconds: list[list[float]] = [[], []]
    cached = 0
    for turn in range(rounds + 1):
        prompt = beginning + [rng.randrange(llm.model.vocab_size) for _ in range(PROMPT_TOKENS - shared)]
        for which, engine in enumerate((paged, prefix)):
            started = time.perf_counter()
            request = _begin(engine, prompt, 1)
            while engine.has_unfinished():
                engine.step()
            if turn:  # the first fills the cache, and touches memory for the first time
                seconds[which].append(time.perf_counter() - started)
                cached = engine.output(request).metrics.tokens_cached
            engine.forget(request)
    ratio = _ratio(seconds[0], seconds[1])
    return FirstToken(PROMPT_TOKENS, cached, _middle(seconds[0]), _middle(seconds[1]), ratio)


def _engine(llm: "LLM", cache: KvCache, longest: int) -> "Engine":
    """An engine around the loaded model with a cache and a storage of its own."""
    from forge.engine.engine import Engine
    from forge.engine.policies import SchedulerConfig

    layout = llm.model.kv_layout(cache.num_available, cache.block_size, llm.kv_dtype)
    storage = llm.model.new_storage(layout)
    return Engine(llm.model, llm.tokenizer, cache, storage, longest, SchedulerConfig(oneshot=False))


def _begin(engine: "Engine", prompt: Sequence[int], max_tokens: int) -> str:
    from forge.engine.sampling_params import SamplingParams

    request_id = "measured"
    engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    return request_id


def _bookkept() -> list[KvCache]:
    longest = BOOKKEEPING_LENGTH + 2048
    blocks = BOOKKEEPING_SEQUENCES * -(-longest // DEFAULT_BLOCK_SIZE)
    return [
        BasicKvCache(BOOKKEEPING_SEQUENCES, longest, DEFAULT_BLOCK_SIZE),
        PagedKvCache(blocks, DEFAULT_BLOCK_SIZE),
        PrefixKvCache(blocks, DEFAULT_BLOCK_SIZE),
    ]


def bookkeeping(cache: KvCache, steps: int) -> Bookkeeping:
    """Time the policy of a decode step of 64 sequences, blocks being taken and indexed as they fill."""
    rng = random.Random(SEED)
    sequences = range(BOOKKEEPING_SEQUENCES)
    for seq_id in sequences:
        tokens = [rng.randrange(1000) for _ in range(BOOKKEEPING_LENGTH + seq_id % cache.block_size)]
        cache.add(seq_id, tokens, max_cached=0)
        cache.reserve(seq_id, len(tokens))
        cache.commit(seq_id, tokens)
    seconds = []
    for step in range(min(steps, 1024)):
        token = [step]
        started = time.perf_counter()
        for seq_id in sequences:
            cache.blocks_needed(seq_id, 1)
            cache.reserve(seq_id, 1)
            cache.block_table(seq_id)
            cache.commit(seq_id, token)
        cache.stats()
        cache.take_events()
        seconds.append(time.perf_counter() - started)
    return Bookkeeping(cache.kind, BOOKKEEPING_SEQUENCES, _middle(seconds))


def allocator_speeds(rounds: int) -> tuple[AllocatorSpeed, ...]:
    """Operations on blocks, and on whole sequences, per second: each round does as many of them as it says."""
    pool, batch = BlockPool(1024), 1024

    def blocks() -> int:
        for block in pool.allocate(batch):
            pool.decref(block)
        return 2 * batch

    def shared() -> int:
        (block,) = pool.allocate(1)
        for _ in range(batch):
            pool.incref(block)
        for _ in range(batch + 1):
            pool.decref(block)
        return 2 * batch

    tokens = list(range(100))

    def sequences(cache: KvCache) -> Callable[[], int]:
        def one_by_one() -> int:
            for seq_id in range(32):
                cache.add(seq_id, tokens)
                cache.reserve(seq_id, len(tokens) - cache.reserved_length(seq_id))
                cache.remove(seq_id)
            return 32

        return one_by_one

    work = {
        "take and give back a block": blocks,
        "share and unshare a block": shared,
        "begin and end a sequence of 100 tokens, basic": sequences(BasicKvCache(32, 128, 16)),
        "the same, paged": sequences(PagedKvCache(64, 16)),
        "the same, prefix": sequences(PrefixKvCache(64, 16)),
    }
    return tuple(AllocatorSpeed(name, _rate(one_round, max(3, rounds // 10))) for name, one_round in work.items())


def _rate(one_round: Callable[[], int], rounds: int) -> float:
    rates = []
    for _ in range(rounds):
        started = time.perf_counter()
        operations = one_round()
        rates.append(operations / (time.perf_counter() - started))
    return median(rates)


def _wasteful(block_sizes: Sequence[int]) -> list[KvCache]:
    basic = BasicKvCache(WASTE_SEQUENCES, WASTE_MAX_LEN, DEFAULT_BLOCK_SIZE)
    slots = WASTE_SEQUENCES * WASTE_MAX_LEN
    return [basic, *(PagedKvCache(-(-slots // size), size) for size in block_sizes)]


def waste(cache: KvCache, bytes_per_token: int) -> Waste:
    """What 64 sequences reserve whose lengths are spread as answers' are: many short, a few long."""
    rng = random.Random(SEED)
    for seq_id in range(WASTE_SEQUENCES):
        tokens = [0] * min(WASTE_MAX_LEN, 1 + int(rng.expovariate(1 / 300)))
        cache.add(seq_id, tokens)
        cache.reserve(seq_id, len(tokens))
        cache.commit(seq_id, tokens)
    stats = cache.stats()
    return Waste(
        cache.kind, cache.block_size, stats.slots_reserved * bytes_per_token, stats.slots_filled * bytes_per_token
    )


def hit_rate(block_size: int) -> HitRate:
    """Requests that share a rubric and end in questions of their own, each after the one before has gone."""
    rng = random.Random(SEED)
    length = RUBRIC_TOKENS + QUESTION_TOKENS
    cache = PrefixKvCache(4 * -(-length // block_size), block_size)
    rubric = [rng.randrange(1000) for _ in range(RUBRIC_TOKENS)]
    for seq_id in range(RUBRIC_REQUESTS):
        prompt = rubric + [rng.randrange(1000) for _ in range(QUESTION_TOKENS)]
        cached = cache.add(seq_id, prompt, max_cached=len(prompt) - 1)
        cache.reserve(seq_id, len(prompt) - cached)
        cache.commit(seq_id, prompt[cached:])
        cache.remove(seq_id)
    stats = cache.stats()
    return HitRate(block_size, stats.prefix_queries, stats.prefix_hits)


def cache_benchmark_object(result: CacheBenchmark) -> dict[str, Any]:
    """For `--json`: seconds and bytes, nothing rounded."""
    return asdict(result) | {
        "waste": [asdict(one) | {"wasted": one.wasted} for one in result.waste],
        "hit_rates": [asdict(one) | {"share": one.share} for one in result.hit_rates],
    }
