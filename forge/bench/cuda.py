"""`forge bench cuda`: forge beside transformers on one GPU, on the same weights, in one run.

The order of things: the GPU's limits; then each contender by itself (two of them would share its memory and clocks): it
loads the model, takes its turns of every figure, and serves every load of requests. forge serves them twice, in process
and over HTTP. Figures and loads are those that
engines publish for an H200, so that a run can be held against what others measured there.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from forge.bench.cases import Case
from forge.bench.contender import Contender, ContenderError, ContenderMissing, Launch
from forge.bench.cuda_results import CudaBenchmark, CudaLimits, Load, LoadResult, Speed, StepResult
from forge.bench.results import FORGE, Skipped
from forge.errors import UsageError

HTTP = "forge over HTTP"
WORKERS = {FORGE: "cuda_forge_worker", HTTP: "cuda_http_worker", "transformers": "cuda_transformers_worker"}
"""Name → worker module."""
PEERS = tuple(name for name in WORKERS if name not in (FORGE, HTTP))
DEFAULT_MODEL = "qwen3-0.6b"
DEFAULT_TYPE = "BF16"
SEED = 1

STEPS = (
    *(
        Case(f"decode{rows}@{context}", f"decode {rows} @ {context:,}", "decode", rows, context, 1)
        for context in (160, 2048)
        for rows in (1, 4, 16, 64)
    ),
    Case("prefill128", "prefill 128", "prefill", 1, 0, 128),
    Case("prefill512", "prefill 512", "prefill", 1, 0, 512),
)
LOADS = (
    Load("128in1@1", 128, 1, 1, 100),
    Load("128in32@4", 128, 32, 4, 400),
    *(
        Load(f"512in1@{concurrency}", 512, 1, concurrency, requests)
        for concurrency, requests in ((1, 100), (4, 400), (16, 800), (64, 2000), (96, 2000), (128, 2000))
    ),
)
PUBLISHED_LOADS = {"qwen3-0.6b": ("128in1@1", "128in32@4"), "qwen3-4b": tuple(load.name for load in LOADS[2:])}
"""The loads that are published for a shape; another model gets those of the first."""

Progress = Callable[[str], None]
"""Called with what is about to be done."""


@dataclass(frozen=True)
class Effort:
    """How long a run measures."""

    repetitions: int = 5
    decode_steps: int = 20
    turn_seconds: float = 0.3
    limit_seconds: float = 1.0
    array_bytes: int = 4 << 30
    request_share: float = 1.0
    """Of each load's requests."""

    @classmethod
    def quick(cls) -> "Effort":
        """Enough to see that everything runs; too little to believe."""
        return cls(2, 3, 0.02, 0.1, 1 << 28, request_share=0.02)


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    model: str = DEFAULT_MODEL
    """A published shape, made up with random weights, or whatever `--model` takes."""
    quantization: str = DEFAULT_TYPE
    """Of a made-up model."""
    steps: tuple[Case, ...] = STEPS
    loads: tuple[Load, ...] = LOADS[:2]
    peers: tuple[str, ...] = PEERS
    kv: str = "paged"
    effort: Effort = Effort()


def plan_for(model: str, quantization: str, only: str | None, peers: Sequence[str], kv: str, effort: Effort) -> Plan:
    """The plan that these options mean. Raises `UsageError` for a name that is none."""
    names = [name.strip() for name in only.split(",")] if only else None
    known = [case.name for case in STEPS] + [load.name for load in LOADS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise UsageError(f"unknown figure {unknown[0]!r}; there are {', '.join(known)}")
    wanted_loads = names or PUBLISHED_LOADS.get(model, PUBLISHED_LOADS[DEFAULT_MODEL])
    chosen = PEERS if list(peers) == ["all"] else () if list(peers) == ["none"] else tuple(peers)
    strangers = [name for name in chosen if name not in PEERS]
    if strangers:
        raise UsageError(f"unknown peer {strangers[0]!r}; there are {', '.join(PEERS)}, all and none")
    return Plan(
        model,
        quantization,
        tuple(case for case in STEPS if names is None or case.name in names),
        tuple(load for load in LOADS if load.name in wanted_loads),
        chosen,
        kv,
        effort,
    )


def run(plan: Plan, on_progress: Progress = lambda text: None) -> Generator[CudaBenchmark, None, None]:
    """Measure, yielding what is known so far after each figure; the last value is the whole.

    Raises `UsageError` for a model that does not exist, `ContenderError` if forge itself fails, or sees no GPU. A peer
    that fails is left out from there on, and its reason is in the result. Closing the iterator ends every process.
    """
    result = CudaBenchmark(model=plan.model, limits=None, contenders={}, steps=(), loads=(), skipped=())
    on_progress("what this GPU can do")
    result = replace(result, limits=measure_limits(plan.effort))
    yield result
    with model_file(plan, on_progress) as (path, vocab_size):
        for name in (FORGE, *([HTTP] if plan.loads else []), *plan.peers):
            try:
                for so_far in _measure(plan, name, path, vocab_size, result, on_progress):
                    result = so_far
                    yield result
            except ContenderError as error:
                if name == FORGE:
                    raise
                result = replace(result, skipped=(*result.skipped, Skipped(name, str(error))))
    yield result


def measure_limits(effort: Effort) -> CudaLimits:
    """The GPU's limits, measured in a process of its own. Raises `ContenderMissing` where there is none."""
    with Contender(Launch("the limits", "cuda_limits_worker")) as worker:
        found = worker.ask("measure", array_bytes=effort.array_bytes, seconds=effort.limit_seconds)
    return CudaLimits(**found)


@contextmanager
def model_file(plan: Plan, on_progress: Progress) -> Iterator[tuple[Path, int]]:
    """The model's path and vocabulary; a published shape is written with random weights, and gone afterwards."""
    from forge.model.catalog import resolve_model
    from forge.model.synth import SHAPES, default_file_name, synth
    from forge.model.weight_source import open_weights

    if plan.model in SHAPES:
        with TemporaryDirectory(prefix="forge-bench-") as folder:
            path = Path(folder) / default_file_name(plan.model, plan.quantization)
            on_progress(f"random weights: {path.name}")
            synth(path, SHAPES[plan.model], plan.quantization)
            yield path, SHAPES[plan.model].vocab_size
        return
    path = resolve_model(plan.model)
    with open_weights(path) as weights:
        vocab_size = weights.config.vocab_size
    yield path, vocab_size


def _measure(
    plan: Plan, name: str, path: Path, vocab_size: int, result: CudaBenchmark, on_progress: Progress
) -> Generator[CudaBenchmark, None, None]:
    """Everything about one contender."""
    on_progress(f"{name} loads")
    longest = [case.length for case in plan.steps] + [load.prompt_tokens + load.output_tokens for load in plan.loads]
    most = max((load.concurrency for load in plan.loads), default=1)
    with Contender(Launch(name, WORKERS[name])) as contender:
        loaded = contender.ask(
            "load", model=str(path.absolute()), max_context=max(longest), max_sequences=most, kv=plan.kv
        )
        result = replace(result, contenders={**result.contenders, name: loaded})
        for case in plan.steps if name != HTTP else ():
            try:
                step = _take_turns(plan, contender, case, vocab_size, on_progress)
                result = replace(result, steps=(*result.steps, step))
            except ContenderMissing as reason:
                result = replace(result, skipped=(*result.skipped, Skipped(f"{name}, {case.title}", str(reason))))
            yield result
        for load in plan.loads:
            load = replace(load, requests=max(load.concurrency, round(load.requests * plan.effort.request_share)))
            on_progress(f"{load.title}: {name}")
            try:
                answer = contender.ask("requests", **load.question, seed=SEED)
                result = replace(result, loads=(*result.loads, LoadResult.of(load, name, answer)))
            except ContenderMissing as reason:
                result = replace(result, skipped=(*result.skipped, Skipped(f"{name}, {load.title}", str(reason))))
            yield result


def _take_turns(plan: Plan, contender: Contender, case: Case, vocab_size: int, on_progress: Progress) -> StepResult:
    on_progress(f"{case.title}: {contender.name}")
    effort = plan.effort
    token_ids = step_token_ids(case, vocab_size)
    prepared = contender.ask("prepare", kind=case.kind, context=case.context, token_ids=token_ids)
    seconds, tops = [], ()
    for _ in range(effort.repetitions):
        steps = effort.decode_steps if case.kind == "decode" else 1
        answer: dict[str, Any] = contender.ask("turn", min_steps=steps, min_seconds=effort.turn_seconds)
        seconds.append(median(answer["seconds"]))
        tops = tuple(answer["top_tokens"])
    return StepResult(case, contender.name, Speed.of(seconds), prepared["setting"], tops)


def step_token_ids(case: Case, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same in every run."""
    rng = random.Random(f"{SEED}-{case.name}")
    return [[rng.randrange(vocab_size) for _ in range(case.length)] for _ in range(case.sequences)]
