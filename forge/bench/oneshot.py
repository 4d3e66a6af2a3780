"""`forge bench oneshot`: requests of one token as generations and as prefill-only requests, in the same run.

One model, loaded once. Two engines, which differ in the class of such requests alone, take turns, and a ratio is taken
turn by turn. Beside the sweep over callers: a control with longer answers, where the gain must vanish; judges beside
generations that fill the pool; and what packing many short prompts into one forward brings beside one long prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated

from forge.bench import kit
from forge.bench.kit import Facts, Progress, option
from forge.cache.paged import PagedKvCache
from forge.cli.arguments import Takes
from forge.cli.options import parse_numbers
from forge.cli.run_control import create_llm
from forge.engine.engine import Engine
from forge.engine_args import EngineArgs
from forge.llm import LLM
from forge.trace.totals import percentile
from forge.views.formatting import plural
from forge.views.screen import Part, Table, check, fill, title
from forge.workload.judging import run_requests
from forge.workload.requests import Request, Workload, WorkloadRun

PARTS = ("sweep", "control", "capacity", "packing")
SCRATCH_JUDGES = 4
"""Judges that the blocks set aside for them hold at once, in `capacity`."""
CONTROL_TOKENS, CONTROL_CONCURRENCY = 32, 4
CLASSES = {"generation": False, "prefill_only": True}
"""Name → whether a generation of one token is prefill-only."""


def screen(facts: Facts) -> Iterator[Part]:
    yield title("What does a generation's life cost a request that wants one token?")
    yield kit.where(facts, f"kv {facts['kv']}, {plural(facts['repetitions'], 'turn')}")
    if levels := [*facts["levels"], *filter(None, [facts["control"]])]:
        columns = ["generation: {generation.median:rate}", "prefill-only: {prefill_only.median:rate}"]
        columns += ["ratio: {ratio:ratio x}", "p95, ms: {generation_p95_ms:ms}, {prefill_only_p95_ms:ms}"]
        yield from (None, Table.of(levels, "requests/s: {concurrency} at once", "out: {output_tokens}", *columns))
        tokens = fill("{prompt_tokens:plural prompt token} each.", levels[0])
        yield f"{tokens} Medians (least–most); p95 of the latency, as generations and prefill-only."
    if part := facts["capacity"]:
        judges = "judges, p95 latency, ms|{generation_p95_ms:ms}|{prefill_only_p95_ms:ms}|{latency_ratio:ratio x}"
        generations = "generations, tokens/s|{generation_tokens_per_second:rate}|{prefill_only_tokens_per_second:rate}"
        rows = [fill(row, part).split("|") for row in (judges, f"{generations}|{{speed_ratio:.2f x}}")]
        headings = ("beside generations", "generation", "prefill-only", "")
        yield from (None, Table(headings, rows))
        pool = (
            "{generations} generations and {judges:plural judge}, {blocks:plural block} on either side; prefill-only, "
            "{scratch} of them are set aside and the rest holds three generations."
        )
        yield fill(pool, part)
    if part := facts["packing"]:
        many = f"prompts of {part['short_tokens']}: {{many.median:rate}}"
        columns = ["one prompt: {one.median:rate}", many, "ratio: {ratio:ratio x}"]
        yield from (None, Table.of([part], "prefill, tokens/s: {tokens:plural token}", *columns))
    if "identical" in facts:
        yield from (None, check(facts["identical"], "both classes gave every request the same tokens"))


@kit.benchmark(screen)
def bench_oneshot(
    say: Progress,
    engine: Annotated[
        EngineArgs,
        Takes("model kv device threads num_blocks max_num_seqs prefill_only_tokens prefill_only_memory", kv="paged"),
    ],
    only: Annotated[str | None, option(f"Parts, with commas: {', '.join(PARTS)}.", default="all")] = None,
    concurrency: Annotated[str, option("Callers, with commas.")] = "1,4,16,64,128",
    prompt_tokens: Annotated[int, option("Of each.")] = 128,
    requests: Annotated[
        int | None, option("In a turn.", "--requests", "-n", default="twice the callers, at least 16")
    ] = None,
    reps: Annotated[int, option("Turns; the median counts.")] = 5,
) -> Facts:
    """Requests of one token as generations and prefill-only: requests/s, latency, capacity, packing.

    [dim]forge bench oneshot -m hash[/dim]
    """
    callers = parse_numbers(concurrency, "--concurrency", "1,16,128", "numbers of callers")
    parts = kit.select(only, PARTS, "part")
    kit.at_least_one(prompt_tokens=prompt_tokens, requests=requests, reps=reps)
    llm = create_llm(engine)
    maker = kit.PromptMaker(llm)
    same: list[bool] = []
    engines = {name: llm.new_engine(prefill_only=prefill_only) for name, prefill_only in CLASSES.items()}

    def level(concurrency: int, output_tokens: int) -> Facts:
        """Measure `concurrency` callers: requests per second, and the turns' median of the 95th percentile of the
        latency."""
        say(f"{prompt_tokens} in, {output_tokens} out, {concurrency} at once")
        number = requests or max(16, 2 * concurrency)
        for contender in engines.values():
            run_requests(contender, maker.prompts(2, prompt_tokens), output_tokens)
        asked = [maker.prompts(number, prompt_tokens) for _ in range(reps)]
        turns = kit.in_turns(
            engines, lambda engine, turn: run_requests(engine, asked[turn], output_tokens, concurrency), reps
        )
        same.extend(left.answers == right.answers for left, right in zip(*turns.values(), strict=True))
        rates = {name: [run.requests_per_second for run in runs] for name, runs in turns.items()}
        return {
            "concurrency": concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "requests": number,
            **kit.compared(rates, faster=1),
            **{f"{name}_p95_ms": median(run.p95_ms for run in runs) for name, runs in turns.items()},
        }

    found: Facts = {"levels": [], "control": None, "capacity": None, "packing": None}
    if "sweep" in parts:
        found["levels"] = [level(concurrency, 1) for concurrency in callers]
    if "control" in parts:
        found["control"] = level(CONTROL_CONCURRENCY, CONTROL_TOKENS)
    if "capacity" in parts:
        say("judges beside generations that fill the pool")
        found["capacity"] = _capacity(llm, maker, prompt_tokens, reps)
        same.append(found["capacity"]["identical"])
    if "packing" in parts:
        say("many prompts in one forward")
        found["packing"] = _packing(llm, maker, prompt_tokens, reps)
    judged = {"identical": all(same)} if same else {}  # packing compares no tokens
    return {**kit.about(llm), "kv": llm.kv, "repetitions": reps, **found, **judged}


def _capacity(llm: LLM, maker: kit.PromptMaker, prompt_tokens: int, reps: int) -> Facts:
    """Run eight generations, and a judge every tenth step meanwhile. Both classes get the same memory.

    As a generation the judges share one pool of `blocks` with the generations; prefill-only, `scratch` of these are set
    aside for them, and the pool that is left holds three generations. latency_ratio: how many times longer the 95th
    percentile of the judges' latency is as a generation. tokens_per_second: of the generations, until the last of them
    has ended. All are medians over `reps` turns, the ratios those of the turns' ratios.
    """
    generations, judges, prompt, output = 8, 24, 64, 192
    size = llm.kv_layout.block_size
    pool, scratch = 3 * -(-(prompt + output) // size), SCRATCH_JUDGES * -(-prompt_tokens // size)
    starts, asked = maker.prompts(generations, prompt), maker.prompts(judges, prompt_tokens)

    def turn(prefill_only: bool, number: int) -> tuple[float, float, list]:
        engine = _small_engine(llm, pool + scratch, scratch if prefill_only else 0)
        return _beside(engine, starts, output, asked)

    latencies, speeds, answers = [], [], []
    for turns in kit.in_turns(CLASSES, turn, reps).values():
        latencies.append([p95 for _, p95, _ in turns])
        speeds.append([speed for speed, _, _ in turns])
        answers += [tokens for _, _, tokens in turns]
    return {
        "blocks": pool + scratch,
        "scratch": scratch,
        "generations": generations,
        "judges": judges,
        **{f"{name}_p95_ms": median(values) for name, values in zip(CLASSES, latencies, strict=True)},
        **{f"{name}_tokens_per_second": median(values) for name, values in zip(CLASSES, speeds, strict=True)},
        "latency_ratio": median(kit.ratios(*latencies)),
        "speed_ratio": median(kit.ratios(*reversed(speeds))),
        "identical": all(tokens == answers[0] for tokens in answers),
    }


def _small_engine(llm: LLM, blocks: int, scratch: int) -> Engine:
    """Return an engine with so many blocks in all, `scratch` of them set aside for prefill-only requests; with none,
    every request is a generation."""
    pool, size = blocks - scratch, llm.kv_layout.block_size
    storage = llm.model.new_storage(llm.model.kv_layout(blocks, size, llm.kv_dtype))
    config = replace(llm.engine.scheduler.config, prefill_only=scratch > 0)
    longest = min(llm.max_model_len, pool * size)
    return Engine(
        llm.model, llm.tokenizer, PagedKvCache(pool, size), storage, longest, config, scratch=range(pool, blocks)
    )


def _beside(
    engine: Engine, generations: Sequence[Sequence[int]], output: int, judges: Sequence[Sequence[int]]
) -> tuple[float, float, list]:
    """Run both; return the generations' tokens per second, the 95th percentile of the judges' latency in ms, and every
    request's tokens."""
    requests = [Request(tuple(prompt), output) for prompt in generations]
    requests += [Request(tuple(prompt), 1, 10 * number + 9) for number, prompt in enumerate(judges)]
    run = WorkloadRun(engine, Workload(tuple(requests), "steps"))
    began = next(iter(run)).started
    for _ in run:
        pass
    samples = [answer.outputs[0] for answer in run.outputs]
    ended = max(sample.metrics.last_token or began for sample in samples[: len(generations)])
    latencies = [sample.metrics.end_to_end_ms or 0.0 for sample in samples[len(generations) :]]
    tokens = [sample.token_ids for sample in samples]
    return len(generations) * output / (ended - began), percentile(latencies, 0.95), tokens


def _packing(llm: LLM, maker: kit.PromptMaker, short: int, reps: int) -> Facts:
    """Return tokens per second of one prompt as long as a step's budget allows, and of as many short ones in one
    forward."""
    pool = llm.engine.cache.stats().num_blocks * llm.kv_layout.block_size
    budget = min(llm.engine.scheduler.config.prefill_only_tokens, llm.max_model_len, pool)
    number = max(1, budget // short)
    engine = llm.new_engine(prefill_only=True, prefill_only_tokens=number * short)

    def speed(shape: tuple[int, int], turn: int) -> float:
        driven = run_requests(engine, maker.prompts(*shape))
        return driven.tokens_computed / driven.seconds

    rates = kit.in_turns({"one": (1, number * short), "many": (number, short)}, speed, reps, warm=1)
    return {"tokens": number * short, "short_tokens": short} | kit.compared(rates, faster=1)
