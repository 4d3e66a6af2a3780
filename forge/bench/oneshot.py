"""`forge bench oneshot`: requests of one token as generations and as requests that keep nothing, in the same run.

One model, loaded once. Two engines, which differ in the class of such requests alone, take turns, and a ratio is taken
turn by turn. Beside the sweep over callers: a control with longer answers, where the gain must vanish; judges beside
generations that fill the pool; and what packing many short prompts into one forward brings beside one long prompt.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forge.bench.judging import JudgeRun, latency_ms, run_requests
from forge.bench.results import Middle
from forge.bench.workload import PASSAGE
from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.engine.engine import Engine
    from forge.llm import LLM

PARTS = ("sweep", "control", "capacity", "packing")
CONCURRENCIES = (1, 4, 16, 64, 128)
PROMPT_TOKENS = 128
CONTROL_TOKENS, CONTROL_CONCURRENCY = 32, 4
SEED = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Level:
    """So many callers, each with so many tokens in and out."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    requests: int
    decode: Middle
    """Requests per second."""
    oneshot: Middle
    ratio: Middle
    """oneshot over decode, turn by turn."""
    decode_p95_ms: float
    """The median of the turns'."""
    oneshot_p95_ms: float


@dataclass(frozen=True)
class Capacity:
    """Judges that come while more long generations run than the pool holds."""

    blocks: int
    generations: int
    judges: int
    decode_p95_ms: float
    oneshot_p95_ms: float
    latency_ratio: float
    """How many times longer the 95th percentile is as a generation."""
    decode_tokens_per_second: float
    """Of the generations, until the last of them has ended."""
    oneshot_tokens_per_second: float
    identical: bool


@dataclass(frozen=True)
class Packing:
    """The same number of prompt tokens as one prompt and as many."""

    tokens: int
    short_tokens: int
    one: Middle
    """Tokens per second."""
    many: Middle
    ratio: Middle


@dataclass(frozen=True)
class OneShotBenchmark:
    """The results of `forge bench oneshot`: prefill-only requests beside generations."""

    model: str
    kv: str
    device: str
    machine: str
    repetitions: int
    levels: tuple[Level, ...]
    control: Level | None
    capacity: Capacity | None
    packing: Packing | None
    identical: bool
    """Both lives gave every request the same tokens."""


def run(
    llm: "LLM",
    parts: Sequence[str] = PARTS,
    concurrencies: Sequence[int] = CONCURRENCIES,
    prompt_tokens: int = PROMPT_TOKENS,
    requests: int | None = None,
    repetitions: int = 5,
    on_progress: Progress = lambda text: None,
    machine: str = "",
) -> OneShotBenchmark:
    """Measure. Raises `UsageError` for an unknown part or a number out of range."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UsageError(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if min(*concurrencies, prompt_tokens, repetitions, requests or 1) < 1:
        raise UsageError("--concurrency, --prompt-tokens, --requests and --reps are at least 1")
    maker = PromptMaker(llm)
    same: list[bool] = []
    engines = [llm.new_engine(oneshot=oneshot) for oneshot in (False, True)]

    def level(concurrency: int, output_tokens: int) -> Level:
        number = requests or max(16, 2 * concurrency)
        found: tuple[list[JudgeRun], list[JudgeRun]] = ([], [])
        for engine in engines:
            run_requests(engine, maker.prompts(2, prompt_tokens), output_tokens)
        for turn in range(repetitions):
            prompts = maker.prompts(number, prompt_tokens)
            for which in (0, 1) if turn % 2 else (1, 0):
                found[which].append(run_requests(engines[which], prompts, output_tokens, concurrency))
            same.append(found[0][-1].answers == found[1][-1].answers)
        decode, fast = ([one.requests_per_second for one in runs] for runs in found)
        return Level(
            concurrency,
            prompt_tokens,
            output_tokens,
            number,
            decode=Middle.of(decode),
            oneshot=Middle.of(fast),
            ratio=Middle.of([ours / theirs for theirs, ours in zip(decode, fast, strict=True)]),
            decode_p95_ms=median(one.p95_ms for one in found[0]),
            oneshot_p95_ms=median(one.p95_ms for one in found[1]),
        )

    levels, control, capacity, packing = [], None, None, None
    if "sweep" in parts:
        for concurrency in concurrencies:
            on_progress(f"{prompt_tokens} in, 1 out, {concurrency} at once")
            levels.append(level(concurrency, 1))
    if "control" in parts:
        on_progress(f"{prompt_tokens} in, {CONTROL_TOKENS} out, {CONTROL_CONCURRENCY} at once")
        control = level(CONTROL_CONCURRENCY, CONTROL_TOKENS)
    if "capacity" in parts:
        on_progress("judges beside generations that fill the pool")
        capacity = _capacity(llm, maker, prompt_tokens)
        same.append(capacity.identical)
    if "packing" in parts:
        on_progress("many prompts in one forward")
        packing = _packing(llm, maker, prompt_tokens, repetitions)
    return OneShotBenchmark(
        llm.model_name,
        llm.kv,
        f"{llm.device} ({llm.device_description})",
        machine,
        repetitions,
        tuple(levels),
        control,
        capacity,
        packing,
        all(same),
    )


class PromptMaker:
    """Prompts that have nothing in common, of tokens that a model has seen."""

    def __init__(self, llm: "LLM"):
        self._passage = list(llm.tokenizer.encode(PASSAGE))
        self._rng = random.Random(SEED)

    def prompts(self, number: int, length: int) -> list[list[int]]:
        return [self._rng.choices(self._passage, k=length) for _ in range(number)]


def _capacity(llm: "LLM", maker: PromptMaker, prompt_tokens: int) -> Capacity:
    """Eight generations, of which the pool holds three; a judge with every tenth step while they run."""
    size = llm.kv_layout.block_size
    generations, judges, prompt, output = 8, 24, 64, 192
    blocks = 3 * -(-(prompt + output) // size)
    starts, asked = maker.prompts(generations, prompt), maker.prompts(judges, prompt_tokens)
    found = [_beside(_small_engine(llm, blocks, oneshot), starts, output, asked) for oneshot in (False, True)]
    (decode_rate, decode_ms, said), (oneshot_rate, oneshot_ms, also_said) = found
    slow, fast = latency_ms(decode_ms, 0.95), latency_ms(oneshot_ms, 0.95)
    identical = said == also_said
    return Capacity(blocks, generations, judges, slow, fast, slow / fast, decode_rate, oneshot_rate, identical)


def _small_engine(llm: "LLM", blocks: int, oneshot: bool) -> "Engine":
    """An engine with a paged cache of so many blocks and scratch as the model's own has."""
    from dataclasses import replace

    from forge.cache.paged import PagedKvCache
    from forge.engine.engine import Engine

    own = llm.engine
    size, scratch = llm.kv_layout.block_size, len(own.scheduler.prefill_only.scratch)
    storage = llm.model.new_storage(llm.model.kv_layout(blocks + scratch, size, llm.kv_dtype))
    config = replace(own.scheduler.config, oneshot=oneshot)
    cache = PagedKvCache(blocks, size)
    longest = min(llm.max_model_len, blocks * size)
    return Engine(llm.model, llm.tokenizer, cache, storage, longest, config, scratch=range(blocks, blocks + scratch))


def _beside(
    engine: "Engine", generations: Sequence[Sequence[int]], output: int, judges: Sequence[Sequence[int]]
) -> tuple[float, list[float], list]:
    """Generations' tokens per second, the judges' latencies in ms, and the tokens of every request."""
    from forge.engine.sampling_params import SamplingParams

    long = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(generations):
        engine.add_request(f"generation-{number}", prompt, long)
    open_generations = [f"generation-{number}" for number in range(len(generations))]
    to_come = list(enumerate(judges))
    asked: dict[str, float] = {}
    latencies: dict[str, float] = {}
    began, ended, steps = time.perf_counter(), 0.0, 0
    while open_generations or asked or to_come:
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
                open_generations = [name for name in open_generations if engine.is_unfinished(name)]
                ended = ended or (0.0 if open_generations else now)
        steps += 1
    names = [*(f"generation-{number}" for number in range(len(generations))), *latencies]
    said = sorted((name, engine.output(name).outputs[0].token_ids) for name in names)
    return len(generations) * output / (ended - began), list(latencies.values()), said


def _packing(llm: "LLM", maker: PromptMaker, short: int, repetitions: int) -> Packing:
    """One prompt as long as a step's budget allows, and as many short ones in one forward."""
    budget = min(llm.engine.scheduler.config.oneshot_tokens, llm.max_model_len)
    number = max(1, budget // short)
    engine = llm.new_engine(oneshot=True, oneshot_tokens=number * short)
    rates: list[list[float]] = [[], []]
    for turn in range(repetitions + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            prompts = maker.prompts(1, number * short) if which == 0 else maker.prompts(number, short)
            found = run_requests(engine, prompts)
            if turn:
                rates[which].append(found.tokens_computed / found.seconds)
    one, many = rates
    ratio = Middle.of([ours / theirs for theirs, ours in zip(one, many, strict=True)])
    return Packing(number * short, short, Middle.of(one), Middle.of(many), ratio)


def oneshot_benchmark_object(result: OneShotBenchmark) -> dict[str, Any]:
    """For `--json`: rates per second and milliseconds, nothing rounded."""
    return asdict(result)
