"""`forge bench prefix-planning`: requests that begin alike, with and without waiting for the one that computes that."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from forge.cache.prefix import PrefixKvCache
from forge.cli import machine, options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import Found, load_model
from forge.engine_args import EngineArgs
from forge.experiments.bench.oneshot import PromptMaker
from forge.experiments.bench.options import at_least_one, option
from forge.experiments.bench.results import Facts, Figure, Progress, ratios, shown, silent
from forge.experiments.bench.tables import Part, Table, title, verdict, where
from forge.llm import LLM
from forge.views.formatting import count, plural
from forge.views.progress import progress_line
from forge.workload.judging import run_requests

REQUESTS = 64
RUBRIC_TOKENS = (100, 400, 1000)
ITEM_TOKENS = 32


@command
def bench_planning(
    engine: Annotated[EngineArgs, Takes("model device threads num_blocks")],
    requests: Annotated[int, option("All at once.", "--requests", "-n")] = REQUESTS,
    rubric_tokens: Annotated[
        list[int] | None, option("Tokens that all begin with; may be repeated.", default="100, 400, 1000")
    ] = None,
    item_tokens: Annotated[int, option("Tokens of each one's own.")] = ITEM_TOKENS,
    reps: Annotated[int, option("Turns; the median counts.")] = 3,
    json: options.JsonOption = False,
) -> Found:
    """Requests that begin with one rubric, with and without waiting for the one that computes it.

    [dim]forge bench prefix-planning --rubric-tokens 400[/dim]
    """
    llm = load_model(engine, kv="prefix")
    with progress_line() as progress:
        facts = run(llm, rubric_tokens or RUBRIC_TOKENS, requests, item_tokens, reps, progress)
    facts["machine"] = machine.cpu_model()
    return shown(facts, screen(facts), json, 0 if _identical(facts) else 1)


def run(
    llm: LLM,
    rubrics: Sequence[int] = RUBRIC_TOKENS,
    requests: int = REQUESTS,
    item_tokens: int = ITEM_TOKENS,
    repetitions: int = 3,
    on_progress: Progress = silent,
) -> Facts:
    """Measure, with each length of rubric that the model's context holds: seconds for all requests, asked at once with
    nothing of them cached, and tokens computed. `llm` has a prefix cache."""
    at_least_one(rubric_tokens=min(rubrics), requests=requests, item_tokens=item_tokens, reps=repetitions)
    maker = PromptMaker(llm)
    engines = {name: llm.new_engine(prefix_planning=planning) for name, planning in (("off", False), ("on", True))}
    for engine in engines.values():
        run_requests(engine, maker.prompts(2, item_tokens))
    shared = []
    for length in (length for length in rubrics if length + item_tokens + 1 <= llm.max_model_len):
        on_progress(f"{requests} requests, a rubric of {length} tokens")
        turns = []
        for turn in range(repetitions):
            (rubric,) = maker.prompts(1, length)
            prompts = [rubric + item for item in maker.prompts(requests, item_tokens)]
            one = {}
            for name in engines if turn % 2 else reversed(engines):
                cache = engines[name].cache
                assert isinstance(cache, PrefixKvCache)
                cache.reset()
                one[name] = run_requests(engines[name], prompts)
            turns.append(one)
        off, on = ([turn[name].seconds for turn in turns] for name in engines)
        shared.append(
            {
                "requests": requests,
                "rubric_tokens": length,
                "item_tokens": item_tokens,
                "off": Figure.of(off),
                "on": Figure.of(on),
                "ratio": Figure.of(ratios(off, on)),
                **{f"tokens_{name}": turns[-1][name].tokens_computed for name in engines},
                "identical": all(turn["off"].answers == turn["on"].answers for turn in turns),
            }
        )
    device = f"{llm.device} ({llm.device_description})"
    return {"model": llm.model_name, "device": device, "repetitions": repetitions, "shared": shared}


def _identical(facts: Facts) -> bool:
    return all(one["identical"] for one in facts["shared"])


def screen(facts: Facts) -> Iterator[Part]:
    yield title("What does it save when requests wait for what one of them computes?")
    yield from (where(facts, f"kv prefix, {plural(facts['repetitions'], 'turn')}"), None)
    rows = [
        (
            plural(one["rubric_tokens"], "token"),
            *(f"{one[name].median:.{2 if one[name].median >= 0.1 else 3}f}" for name in ("off", "on")),
            one["ratio"].times(),
            count(one["tokens_off"]),
            count(one["tokens_on"]),
        )
        for one in facts["shared"]
    ]
    yield Table(("rubric", "off, s", "on, s", "faster", "tokens off", "on"), rows)
    for one in facts["shared"][:1]:
        asked, own = plural(one["requests"], "request"), plural(one["item_tokens"], "token")
        yield f"{asked} at once, each with {own} of its own; nothing is cached before. Medians (least–most)."
    yield verdict(_identical(facts), "the same tokens with and without")
