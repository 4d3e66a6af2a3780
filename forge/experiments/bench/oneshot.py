"""`forge bench oneshot`: requests of one token as generations and as prefill-only requests, in the same run.

One model, loaded once. Two engines, which differ in the class of such requests alone, take turns, and a ratio is taken
turn by turn. Beside the sweep over callers: a control with longer answers, where the gain must vanish; judges beside
generations that fill the pool; and what packing many short prompts into one forward brings beside one long prompt.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated

from forge.cache.paged import PagedKvCache
from forge.cli import machine, options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import Found, load_model
from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.bench.options import at_least_one, option
from forge.experiments.bench.results import Facts, Figure, Progress, ratios, shown, silent
from forge.experiments.bench.tables import Part, Table, ratio_text, title, verdict, where
from forge.llm import LLM
from forge.views.formatting import ms, plural, rate
from forge.views.progress import progress_line
from forge.workload.judging import latency_ms, run_requests
from forge.workload.requests import PASSAGE

PARTS = ("sweep", "control", "capacity", "packing")
CONCURRENCIES = (1, 4, 16, 64, 128)
PROMPT_TOKENS = 128
CONTROL_TOKENS, CONTROL_CONCURRENCY = 32, 4
SEED = 1
CLASSES = {"generation": False, "prefill_only": True}
"""Name → whether a generation of one token is prefill-only."""


@command
def bench_oneshot(
    engine: Annotated[
        EngineArgs,
        Takes("model kv device threads num_blocks max_num_seqs prefill_only_tokens prefill_only_memory", kv="paged"),
    ],
    only: Annotated[str | None, option(f"Parts, with commas: {', '.join(PARTS)}.", default="all")] = None,
    concurrency: Annotated[str, option("Callers, with commas.")] = "1,4,16,64,128",
    prompt_tokens: Annotated[int, option("Of each.")] = PROMPT_TOKENS,
    requests: Annotated[
        int | None, option("In a turn.", "--requests", "-n", default="twice the callers, at least 16")
    ] = None,
    reps: Annotated[int, option("Turns; the median counts.")] = 5,
    json: options.JsonOption = False,
) -> Found:
    """Requests of one token as generations and prefill-only: requests/s, latency, capacity, packing.

    [dim]forge bench oneshot -m hash[/dim]
    """
    callers = [int(number) if number.strip().isdecimal() else 0 for number in concurrency.split(",")]
    if min(callers) < 1:
        raise UsageError(f"--concurrency takes numbers of callers such as 1,16,128, and not {concurrency!r}")
    llm = load_model(engine)
    parts = [part.strip() for part in only.split(",")] if only else PARTS
    with progress_line() as progress:
        facts = run(llm, parts, callers, prompt_tokens, requests, reps, progress)
    facts["machine"] = machine.cpu_model()
    return shown(facts, screen(facts), json, 0 if facts["identical"] else 1)


def run(
    llm: LLM,
    parts: Sequence[str] = PARTS,
    concurrencies: Sequence[int] = CONCURRENCIES,
    prompt_tokens: int = PROMPT_TOKENS,
    requests: int | None = None,
    repetitions: int = 5,
    on_progress: Progress = silent,
) -> Facts:
    """Measure. identical: both classes gave every request the same tokens. Raises `UsageError` for an unknown part or a
    number out of range."""
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"unknown part {part!r}; there are {', '.join(PARTS)}")
    at_least_one(concurrency=min(concurrencies), prompt_tokens=prompt_tokens, requests=requests, reps=repetitions)
    maker = PromptMaker(llm)
    same: list[bool] = []
    engines = {name: llm.new_engine(prefill_only=prefill_only) for name, prefill_only in CLASSES.items()}

    def level(concurrency: int, output_tokens: int) -> Facts:
        """So many callers, each with so many tokens in and out: requests per second, and the turns' median of the 95th
        percentile of the latency."""
        on_progress(f"{prompt_tokens} in, {output_tokens} out, {concurrency} at once")
        number = requests or max(16, 2 * concurrency)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        p95s: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            run_requests(engine, maker.prompts(2, prompt_tokens), output_tokens)
        for turn in range(repetitions):
            prompts, answers = maker.prompts(number, prompt_tokens), []
            for name in engines if turn % 2 else reversed(engines):
                one = run_requests(engines[name], prompts, output_tokens, concurrency)
                rates[name].append(one.requests_per_second)
                p95s[name].append(one.p95_ms)
                answers.append(one.answers)
            same.append(answers[0] == answers[1])
        return {
            "concurrency": concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "requests": number,
            **{name: Figure.of(each) for name, each in rates.items()},
            "ratio": Figure.of(ratios(rates["prefill_only"], rates["generation"])),
            **{f"{name}_p95_ms": median(each) for name, each in p95s.items()},
        }

    levels = [level(concurrency, 1) for concurrency in concurrencies] if "sweep" in parts else []
    control = level(CONTROL_CONCURRENCY, CONTROL_TOKENS) if "control" in parts else None
    capacity = packing = None
    if "capacity" in parts:
        on_progress("judges beside generations that fill the pool")
        capacity = _capacity(llm, maker, prompt_tokens)
        same.append(capacity["identical"])
    if "packing" in parts:
        on_progress("many prompts in one forward")
        packing = _packing(llm, maker, prompt_tokens, repetitions)
    return {
        "model": llm.model_name,
        "kv": llm.kv,
        "device": f"{llm.device} ({llm.device_description})",
        "repetitions": repetitions,
        "levels": levels,
        "control": control,
        "capacity": capacity,
        "packing": packing,
        "identical": all(same),
    }


class PromptMaker:
    """Prompts that have nothing in common, of tokens that a model has seen."""

    def __init__(self, llm: LLM):
        self._passage = list(llm.tokenizer.encode(PASSAGE))
        self._rng = random.Random(SEED)

    def prompts(self, number: int, length: int) -> list[list[int]]:
        return [self._rng.choices(self._passage, k=length) for _ in range(number)]


def _capacity(llm: LLM, maker: PromptMaker, prompt_tokens: int) -> Facts:
    """Eight generations, of which the pool holds three; a judge with every tenth step while they run. latency_ratio:
    how many times longer the 95th percentile of the judges' latency is as a generation. tokens_per_second: of the
    generations, until the last of them has ended."""
    size = llm.kv_layout.block_size
    generations, judges, prompt, output = 8, 24, 64, 192
    blocks = 3 * -(-(prompt + output) // size)
    starts, asked = maker.prompts(generations, prompt), maker.prompts(judges, prompt_tokens)
    found: Facts = {}
    answers = []
    for name, prefill_only in CLASSES.items():
        speed, latencies, said = _beside(_small_engine(llm, blocks, prefill_only), starts, output, asked)
        found |= {f"{name}_p95_ms": latency_ms(latencies, 0.95), f"{name}_tokens_per_second": speed}
        answers.append(said)
    return {
        "blocks": blocks,
        "generations": generations,
        "judges": judges,
        **found,
        "latency_ratio": found["generation_p95_ms"] / found["prefill_only_p95_ms"],
        "identical": answers[0] == answers[1],
    }


def _small_engine(llm: LLM, blocks: int, prefill_only: bool) -> Engine:
    """An engine with a paged cache of so many blocks and scratch as the model's own has."""
    own = llm.engine
    size, scratch = llm.kv_layout.block_size, len(own.scheduler.prefill_only.scratch)
    storage = llm.model.new_storage(llm.model.kv_layout(blocks + scratch, size, llm.kv_dtype))
    config = replace(own.scheduler.config, prefill_only=prefill_only)
    cache = PagedKvCache(blocks, size)
    longest = min(llm.max_model_len, blocks * size)
    return Engine(llm.model, llm.tokenizer, cache, storage, longest, config, scratch=range(blocks, blocks + scratch))


def _beside(
    engine: Engine, generations: Sequence[Sequence[int]], output: int, judges: Sequence[Sequence[int]]
) -> tuple[float, list[float], list]:
    """Generations' tokens per second, the judges' latencies in ms, and the tokens of every request."""
    long = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    one = replace(long, max_tokens=1)
    names = [f"generation-{number}" for number in range(len(generations))]
    for name, prompt in zip(names, generations, strict=True):
        engine.add_request(name, prompt, long)
    unfinished, to_come = names, list(enumerate(judges))
    asked: dict[str, float] = {}
    latencies: dict[str, float] = {}
    began, ended, steps = time.perf_counter(), 0.0, 0
    while unfinished or asked or to_come:
        if to_come and steps % 10 == 9:
            number, prompt = to_come.pop(0)
            asked[f"judge-{number}"] = time.perf_counter()
            engine.add_request(f"judge-{number}", prompt, one)
        if engine.has_unfinished():
            record = engine.step()
            now = time.perf_counter()
            for request_id in [name for name in asked if record.finished and not engine.is_unfinished(name)]:
                latencies[request_id] = (now - asked.pop(request_id)) * 1e3
            if record.finished:
                unfinished = [name for name in unfinished if engine.is_unfinished(name)]
                ended = ended or (0.0 if unfinished else now)
        steps += 1
    said = sorted((name, engine.output(name).outputs[0].token_ids) for name in (*names, *latencies))
    return len(generations) * output / (ended - began), list(latencies.values()), said


def _packing(llm: LLM, maker: PromptMaker, short: int, repetitions: int) -> Facts:
    """Tokens per second of one prompt as long as a step's budget allows, and of as many short ones in one forward."""
    budget = min(llm.engine.scheduler.config.prefill_only_tokens, llm.max_model_len)
    number = max(1, budget // short)
    engine = llm.new_engine(prefill_only=True, prefill_only_tokens=number * short)
    rates: dict[str, list[float]] = {"one": [], "many": []}
    for turn in range(repetitions + 1):
        for name in rates if turn % 2 else reversed(rates):
            prompts = maker.prompts(1, number * short) if name == "one" else maker.prompts(number, short)
            found = run_requests(engine, prompts)
            if turn:
                rates[name].append(found.tokens_computed / found.seconds)
    figures = {name: Figure.of(each) for name, each in rates.items()}
    return {"tokens": number * short, "short_tokens": short, **figures} | {
        "ratio": Figure.of(ratios(rates["many"], rates["one"]))
    }


def screen(facts: Facts) -> Iterator[Part]:
    yield title("What does a generation's life cost a request that wants one token?")
    yield where(facts, f"kv {facts['kv']}, {plural(facts['repetitions'], 'turn')}")
    levels = [*facts["levels"], *filter(None, [facts["control"]])]
    if levels:
        rows = [
            (
                f"{one['concurrency']} at once",
                str(one["output_tokens"]),
                rate(one["generation"].median),
                rate(one["prefill_only"].median),
                one["ratio"].times(),
                f"{ms(one['generation_p95_ms'])}, {ms(one['prefill_only_p95_ms'])}",
            )
            for one in levels
        ]
        yield from (None, Table(("requests/s", "out", "generation", "prefill-only", "ratio", "p95, ms"), rows))
        tokens = plural(levels[0]["prompt_tokens"], "prompt token")
        yield f"{tokens} each. Medians (least–most); p95 of the latency, as generations and prefill-only."
    if one := facts["capacity"]:
        p95s = one["generation_p95_ms"], one["prefill_only_p95_ms"]
        speeds = one["generation_tokens_per_second"], one["prefill_only_tokens_per_second"]
        beside = [
            ("judges, p95 latency, ms", *map(ms, p95s), f"{ratio_text(one['latency_ratio'])} x"),
            ("generations, tokens/s", *map(rate, speeds), f"{ratio_text(speeds[1] / speeds[0])} x"),
        ]
        yield from (None, Table(("beside generations", "generation", "prefill-only", ""), beside))
        pool, judges = plural(one["blocks"], "block"), plural(one["judges"], "judge")
        yield f"{one['generations']} generations of which the pool ({pool}) holds three; {judges}."
    if one := facts["packing"]:
        speeds = rate(one["one"].median), rate(one["many"].median)
        row = (plural(one["tokens"], "token"), *speeds, one["ratio"].times())
        headings = ("prefill, tokens/s", "one prompt", f"prompts of {one['short_tokens']}", "ratio")
        yield from (None, Table(headings, [row]))
    yield from (None, verdict(facts["identical"], "both classes gave every request the same tokens"))
