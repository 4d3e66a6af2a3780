"""`forge bench prefix-planning`: requests that begin alike, with and without waiting for who computes that."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forge.bench.judging import JudgeRun, run_requests
from forge.bench.oneshot import PromptMaker
from forge.bench.results import Middle
from forge.cache.prefix import PrefixKvCache
from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.llm import LLM

REQUESTS = 64
RUBRIC_TOKENS = (100, 400, 1000)
ITEM_TOKENS = 32


@dataclass(frozen=True)
class Shared:
    """Requests whose first tokens are the same, all at once and nothing of them cached."""

    requests: int
    rubric_tokens: int
    item_tokens: int
    off: Middle
    """Seconds for all of them."""
    on: Middle
    ratio: Middle
    """How many times faster it is with planning on, turn by turn."""
    tokens_off: int
    """Tokens computed."""
    tokens_on: int
    identical: bool


@dataclass(frozen=True)
class PlanningBenchmark:
    """The results of the benchmark of prefix planning."""

    model: str
    device: str
    machine: str
    repetitions: int
    shared: tuple[Shared, ...]


def run(
    llm: "LLM",
    rubrics: Sequence[int] = RUBRIC_TOKENS,
    requests: int = REQUESTS,
    item_tokens: int = ITEM_TOKENS,
    repetitions: int = 3,
    on_progress: Callable[[str], None] = lambda text: None,
    machine: str = "",
) -> PlanningBenchmark:
    """Measure, with each length of rubric that the model's context holds. `llm` has a prefix cache."""
    if min(*rubrics, requests, item_tokens, repetitions) < 1:
        raise UsageError("--rubric-tokens, --requests, --item-tokens and --reps are at least 1")
    maker = PromptMaker(llm)
    engines = [llm.new_engine(prefix_planning=planning) for planning in (False, True)]
    for engine in engines:
        run_requests(engine, maker.prompts(2, item_tokens))
    found = []
    for length in rubrics:
        if length + item_tokens + 1 > llm.max_model_len:
            continue
        on_progress(f"{requests} requests, a rubric of {length} tokens")
        turns: tuple[list[JudgeRun], list[JudgeRun]] = ([], [])
        for turn in range(repetitions):
            (rubric,) = maker.prompts(1, length)
            prompts = [rubric + item for item in maker.prompts(requests, item_tokens)]
            for which in (0, 1) if turn % 2 else (1, 0):
                cache = engines[which].cache
                assert isinstance(cache, PrefixKvCache)
                cache.reset()
                turns[which].append(run_requests(engines[which], prompts))
        off, on = ([one.seconds for one in runs] for runs in turns)
        found.append(
            Shared(
                requests,
                length,
                item_tokens,
                off=Middle.of(off),
                on=Middle.of(on),
                ratio=Middle.of([theirs / ours for theirs, ours in zip(off, on, strict=True)]),
                tokens_off=turns[0][-1].tokens_computed,
                tokens_on=turns[1][-1].tokens_computed,
                identical=all(theirs.answers == ours.answers for theirs, ours in zip(*turns, strict=True)),
            )
        )
    return PlanningBenchmark(
        llm.model_name, f"{llm.device} ({llm.device_description})", machine, repetitions, tuple(found)
    )


def planning_benchmark_object(result: PlanningBenchmark) -> dict[str, Any]:
    """For `--json`: seconds, nothing rounded."""
    return asdict(result)
