"""`forge bench cache`: paged against contiguous in the same run, and what keeping a prefix saves.

One model is loaded once and served by several engines, which differ in their cache alone and take turns, a step of one
and a step of the next, so that whatever else the machine does meets them alike. A ratio is taken step by step, and its
median is shown. What no model is needed for (how long the policy itself takes, what is reserved and stays empty)
is measured on the caches alone.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Annotated

from forge.bench import kit
from forge.bench.kit import Facts, Figure, Progress, QuickOption, option
from forge.bench.worker import timed
from forge.cache.basic import BasicKvCache
from forge.cache.block_pool import BlockPool
from forge.cache.kv_cache import KvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.cli.arguments import Takes
from forge.engine.engine import Engine
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.llm import LLM
from forge.views.formatting import plural, ratio
from forge.views.screen import Part, Table, title
from forge.workload.judging import run_requests

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


EFFORT, QUICK = (60, 5, 300), (6, 2, 20)
"""Steps of each engine for each figure, its prompts for the time to the first token, and steps of the policies alone;
with `--quick` too few to believe."""


def screen(facts: Facts) -> Iterator[Part]:
    """Draw time, then memory, then hits; each table with what its figures are."""
    yield from (title("What does paging cost, and what does it save?"), kit.where(facts), None)
    shown = {
        "ms": lambda seconds: f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 2}f}",
        "us": lambda seconds: f"{seconds * 1e6:,.0f}",
        "fine": lambda value: f"{value:.3f}" if value < 2 else ratio(value),
    }
    compared = {"contiguous": ("basic", ""), "paged": ("paged", "ratio"), "scattered": ("scattered", "scattered_ratio")}
    steps = [
        {**timing, "cache": name, "step": timing[step], "of": timing.get(times)}
        for timing in facts["step_times"]
        for name, (step, times) in compared.items()
    ]
    columns = ["decode at: {length:plural token}", "block: {block_size}", "cache: {cache}"]
    yield Table.of(steps, *columns, "ms per step: {step:ms}", "of contiguous: {of:fine x}", formats=shown, grouped=2)
    yield (
        f"One sequence, whole steps: scheduling, forward pass, choice. {plural(facts['steps'], 'step')} of each, in "
        "turn, from the same prompt; medians (quartiles), the ratio taken step by step. scattered: paged, its blocks "
        "in no order."
    )
    yield from (f"· {reason}" for reason in facts["skipped"])
    yield None
    if first_token := facts["first_token"]:
        heading = "ms to first token: {cached_tokens:count} of {prompt_tokens:count} found"
        yield Table.of(
            [first_token], heading, "paged: {paged:ms}", "prefix: {prefix:ms}", "sooner: {ratio:fine x}", formats=shown
        )
    else:
        yield "· time to first token: the model's context is too short"
    of_policy = "policy alone: bookkeeping of a step, {sequences:plural sequence}, {kind}"
    alone = Table.of(facts["bookkeeping"], of_policy, ": {seconds:us}", ": µs", formats=shown)
    speeds = Table.of(facts["allocator"], ": {name}", ": {operations_per_second:rate}", ": per second")
    yield from (None, replace(alone, rows=[*alone.rows, *speeds.rows]), None)
    sizes = ("reserved: {bytes_reserved:size}", "empty: {bytes_empty:size}", "empty: {wasted:share}")
    yield Table.of(facts["waste"], "memory: {kind}", "block: {block_size}", *sizes)
    yield from ("64 sequences of up to 2,048 tokens, many short and a few long, mean 300.", None)
    hits = ("prompt tokens: {prompt_tokens:count}", "found: {tokens_found:count}", "hit rate: {share:share}")
    yield Table.of(facts["hit_rates"], "prefix: 32 requests", "block: {block_size}", *hits)
    yield "Each has the same 200 tokens in front of 30 of its own, and comes when the one before has gone."


@kit.benchmark(screen)
def bench_cache(
    say: Progress,
    engine: Annotated[EngineArgs, Takes("model device threads")],
    length: Annotated[list[int] | None, option("Tokens in the cache; may be repeated.", default="128, 1024")] = None,
    block_size: Annotated[list[int] | None, option("Tokens per block; may be repeated.", default="1, 16, 64")] = None,
    reps: Annotated[int | None, option("Steps of each cache per figure; 60 if not given.")] = None,
    quick: QuickOption = False,
) -> Facts:
    """The paged cache beside the contiguous one: time per step, what is reserved and empty, what a prefix saves.

    [dim]forge bench cache -m Qwen3-0.6B-Q8_0.gguf --length 1024 --block-size 16[/dim]
    """
    steps, rounds, policy_steps = QUICK if quick else EFFORT
    steps = steps if reps is None else reps
    lengths, block_sizes = length or LENGTHS, block_size or BLOCK_SIZES
    kit.at_least_one(length=min(lengths), block_size=min(block_sizes), reps=steps)
    say(f"load {engine.model}")
    llm = LLM.from_engine_args(replace(engine, kv="paged", num_blocks=1))  # its own cache is not used
    fitting = [tokens for tokens in lengths if tokens + steps + 2 <= llm.max_model_len]
    times = []
    for tokens, size in product(fitting, block_sizes):
        say(f"decode at {tokens:,} tokens, blocks of {size}")
        times.append(_step_time(llm, tokens, size, steps))
    say("time to first token with a prefix that is there")
    first_token = _first_token(llm, rounds) if llm.max_model_len >= PROMPT_TOKENS + 2 else None
    say("the policies alone")
    slots, longest = WASTE_SEQUENCES * WASTE_MAX_LEN, BOOKKEEPING_LENGTH + 2048
    wasteful: list[KvCache] = [BasicKvCache(WASTE_SEQUENCES, WASTE_MAX_LEN, DEFAULT_BLOCK_SIZE)]
    wasteful += [PagedKvCache(-(-slots // size), size) for size in block_sizes]
    blocks = BOOKKEEPING_SEQUENCES * -(-longest // DEFAULT_BLOCK_SIZE)
    bookkept: list[KvCache] = [BasicKvCache(BOOKKEEPING_SEQUENCES, longest, DEFAULT_BLOCK_SIZE)]
    bookkept += [kind(blocks, DEFAULT_BLOCK_SIZE) for kind in (PagedKvCache, PrefixKvCache)]
    return {
        **kit.about(llm),
        "steps": steps,
        "step_times": times,
        "skipped": [f"{length:,} tokens do not fit the model's context" for length in lengths if length not in fitting],
        "first_token": first_token,
        "bookkeeping": [bookkeeping(cache, policy_steps) for cache in bookkept],
        "allocator": allocator_speeds(policy_steps),
        "waste": [waste(cache, llm.kv_layout.bytes_per_token) for cache in wasteful],
        "hit_rates": [hit_rate(size) for size in block_sizes],
    }


def _step_time(llm: LLM, length: int, block_size: int, steps: int) -> Facts:
    """Time decode steps of one sequence, everything in them (scheduling, forward pass, choosing a token), with three
    caches in turn from the same prompt on: contiguous, paged in a fresh pool, and paged in a pool that hands its blocks
    out in no order, as after a long time."""
    longest = length + steps + 2
    blocks = -(-longest // block_size)
    rng = random.Random(SEED)
    prompt = [rng.randrange(llm.model.vocab_size) for _ in range(length)]
    caches: dict[str, KvCache] = {
        "basic": BasicKvCache(1, longest, block_size),
        "paged": PagedKvCache(2 * blocks, block_size),
        "scattered": _scattered(PagedKvCache(2 * blocks, block_size)),
    }
    engines = {name: _engine(llm, cache, longest) for name, cache in caches.items()}
    params = SamplingParams(max_tokens=steps + 2, temperature=0.0, ignore_eos=True)
    for engine in engines.values():
        engine.add_request("measured", prompt, params)
        while not engine.step().tokens:
            pass
        engine.step()  # the first decode after a prefill finds nothing of the weights in the processor's cache
    seconds = kit.in_turns(engines, lambda engine, turn: timed(engine.step)[1], steps)
    return {
        "length": length,
        "block_size": block_size,
        **{name: Figure.quartiles(taken) for name, taken in seconds.items()},
        "ratio": Figure.quartiles(kit.ratios(seconds["paged"], seconds["basic"])),
        "scattered_ratio": Figure.quartiles(kit.ratios(seconds["scattered"], seconds["basic"])),
    }


def _scattered(cache: PagedKvCache) -> PagedKvCache:
    """Return the same cache with a free list out of order: neighbours are no longer neighbours."""
    order = list(cache.pool.allocate(len(cache.pool.free)))
    random.Random(SEED).shuffle(order)
    for block in order:
        cache.pool.decref(block)
    return cache


def _first_token(llm: LLM, rounds: int) -> Facts:
    """Run prompts that begin alike and end differently once through each engine in turn; return the seconds to the
    first token with nothing cached, with the beginning cached, and prompt by prompt how many times sooner that is."""
    size, longest = DEFAULT_BLOCK_SIZE, PROMPT_TOKENS + 2
    shared = -(-round(PROMPT_TOKENS * HIT_SHARE) // size) * size
    blocks = 4 * -(-longest // size)
    rng = random.Random(SEED)
    beginning = [rng.randrange(llm.model.vocab_size) for _ in range(shared)]
    ends = [[rng.randrange(llm.model.vocab_size) for _ in range(PROMPT_TOKENS - shared)] for _ in range(rounds + 1)]
    kinds = {"paged": PagedKvCache, "prefix": PrefixKvCache}
    engines = {name: _engine(llm, kind(blocks, size), longest) for name, kind in kinds.items()}
    # The first fills the cache, and touches memory for the first time.
    turns = kit.in_turns(engines, lambda engine, turn: run_requests(engine, [beginning + ends[turn]]), rounds, 1)
    cached = turns["prefix"][-1].tokens_cached
    seconds = {name: [run.seconds for run in runs] for name, runs in turns.items()}
    return {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": cached} | kit.compared(seconds, Figure.quartiles)


def _engine(llm: LLM, cache: KvCache, longest: int) -> Engine:
    """Return an engine around the loaded model with a cache and a storage of its own."""
    storage = llm.model.new_storage(llm.model.kv_layout(cache.num_blocks, cache.block_size, llm.kv_dtype))
    return Engine(llm.model, llm.tokenizer, cache, storage, longest, SchedulerConfig(prefill_only=False))


def _compute(cache: KvCache, seq_id: int, tokens: list[int], max_cached: int | None = None) -> None:
    """Take in a sequence and compute what of it is not cached."""
    cached = cache.add(seq_id, tokens, max_cached=max_cached)
    cache.reserve(seq_id, len(tokens) - cached)
    cache.commit(seq_id, tokens[cached:])


def bookkeeping(cache: KvCache, steps: int) -> Facts:
    """Return what the policy takes of a decode step of 64 sequences, blocks being taken and indexed as they fill:
    blocks_needed, reserve, block_table and commit for each, then the statistics and the events."""
    rng = random.Random(SEED)
    sequences = range(BOOKKEEPING_SEQUENCES)
    for seq_id in sequences:
        tokens = [rng.randrange(1000) for _ in range(BOOKKEEPING_LENGTH + seq_id % cache.block_size)]
        _compute(cache, seq_id, tokens, max_cached=0)

    def step(token: list[int]) -> None:
        for seq_id in sequences:
            cache.blocks_needed(seq_id, 1)
            cache.reserve(seq_id, 1)
            cache.block_table(seq_id)
            cache.commit(seq_id, token)
        cache.stats()
        cache.take_events()

    seconds = [timed(partial(step, [token]))[1] for token in range(min(steps, 1024))]
    return {"kind": cache.kind, "sequences": BOOKKEEPING_SEQUENCES, "seconds": Figure.quartiles(seconds)}


def allocator_speeds(rounds: int) -> list[Facts]:
    """Measure operations on blocks, and on whole sequences, per second; each round returns how many it did."""
    pool, batch, tokens = BlockPool(1024), 1024, list(range(100))

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

    def sequences(cache: KvCache) -> int:
        for seq_id in range(32):
            cache.add(seq_id, tokens)
            cache.reserve(seq_id, len(tokens) - cache.reserved_length(seq_id))
            cache.remove(seq_id)
        return 32

    work: dict[str, Callable[[], int]] = {
        "take and give back a block": blocks,
        "share and unshare a block": shared,
        "begin and end a sequence of 100 tokens, basic": partial(sequences, BasicKvCache(32, 128, 16)),
        "the same, paged": partial(sequences, PagedKvCache(64, 16)),
        "the same, prefix": partial(sequences, PrefixKvCache(64, 16)),
    }
    speeds = {name: [timed(one_round) for _ in range(max(3, rounds // 10))] for name, one_round in work.items()}
    return [
        {"name": name, "operations_per_second": median(operations / seconds for operations, seconds in taken)}
        for name, taken in speeds.items()
    ]


def waste(cache: KvCache, bytes_per_token: int) -> Facts:
    """Return what 64 sequences reserve whose lengths are spread as answers' are: many short, a few long. wasted: the
    share of it that is empty."""
    rng = random.Random(SEED)
    for seq_id in range(WASTE_SEQUENCES):
        tokens = [0] * min(WASTE_MAX_LEN, 1 + int(rng.expovariate(1 / 300)))
        _compute(cache, seq_id, tokens)
    stats = cache.stats()
    reserved = stats.used_blocks * cache.block_size
    return {
        "kind": cache.kind,
        "block_size": cache.block_size,
        "bytes_reserved": reserved * bytes_per_token,
        "bytes_filled": stats.tokens_held * bytes_per_token,
        "bytes_empty": (reserved - stats.tokens_held) * bytes_per_token,
        "wasted": 1 - stats.tokens_held / reserved,
    }


def hit_rate(block_size: int) -> Facts:
    """Measure the hit rate of requests that share a rubric and end in questions of their own, one after another."""
    rng = random.Random(SEED)
    length = RUBRIC_TOKENS + QUESTION_TOKENS
    cache = PrefixKvCache(4 * -(-length // block_size), block_size)
    rubric = [rng.randrange(1000) for _ in range(RUBRIC_TOKENS)]
    for seq_id in range(RUBRIC_REQUESTS):
        prompt = rubric + [rng.randrange(1000) for _ in range(QUESTION_TOKENS)]
        _compute(cache, seq_id, prompt, len(prompt) - 1)
        cache.remove(seq_id)
    asked, hits = cache.stats().prefix_queries, cache.stats().prefix_hits
    return {"block_size": block_size, "prompt_tokens": asked, "tokens_found": hits, "share": hits / asked}
