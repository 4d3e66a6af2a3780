"""`forge bench prefix-planning`: requests that begin alike, with and without waiting for the one that computes that."""

from collections.abc import Iterator
from typing import Annotated

from forge.bench import kit
from forge.bench.kit import Facts, Progress, option
from forge.cli.arguments import Takes
from forge.cli.run_control import create_llm
from forge.engine.engine import Engine
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.formatting import plural
from forge.views.screen import Part, Table, check, fill, title
from forge.workload.judging import JudgeRun, run_requests


def screen(facts: Facts) -> Iterator[Part]:
    yield title("What does it save when requests wait for what one of them computes?")
    yield from (kit.where(facts, f"kv prefix, {plural(facts['repetitions'], 'turn')}"), None)
    seconds = {"s": lambda value: f"{value:.{2 if value >= 0.1 else 3}f}"}
    columns = ["off, s: {off.median:s}", "on, s: {on.median:s}", "faster: {ratio:ratio x}"]
    counts = ("tokens off: {tokens_off:count}", "on: {tokens_on:count}")
    yield Table.of(facts["shared"], "rubric: {rubric_tokens:plural token}", *columns, *counts, formats=seconds)
    asked = "{requests:plural request} at once, each with {item_tokens:plural token} of its own; nothing is cached "
    yield from (fill(f"{asked}before. Medians (least–most).", figure) for figure in facts["shared"][:1])
    yield check(facts["identical"], "the same tokens with and without")


@kit.benchmark(screen)
def bench_prefix_planning(
    say: Progress,
    engine: Annotated[EngineArgs, Takes("model device threads num_blocks", kv="prefix")],
    requests: Annotated[int, option("All at once.", "--requests", "-n")] = 64,
    rubric_tokens: Annotated[
        list[int] | None, option("Tokens that all begin with; may be repeated.", default="100, 400, 1000")
    ] = None,
    item_tokens: Annotated[int, option("Tokens of each one's own.")] = 32,
    reps: Annotated[int, option("Turns; the median counts.")] = 3,
) -> Facts:
    """Requests that begin with one rubric, with and without waiting for the one that computes it.

    [dim]forge bench prefix-planning --rubric-tokens 400[/dim]
    """
    rubrics = rubric_tokens or (100, 400, 1000)
    kit.at_least_one(rubric_tokens=min(rubrics), requests=requests, item_tokens=item_tokens, reps=reps)
    llm = create_llm(engine)
    maker = kit.PromptMaker(llm)
    engines = {name: llm.new_engine(prefix_planning=planning) for name, planning in (("off", False), ("on", True))}
    for contender in engines.values():
        run_requests(contender, maker.prompts(2, item_tokens))
    shared, most = [], llm.max_model_len - item_tokens - 1
    if min(rubrics) > most:
        raise UsageError(f"--rubric-tokens is at most {most}, what the model's context leaves")
    for length in (length for length in rubrics if length <= most):
        say(f"{requests} requests, a rubric of {length} tokens")
        prompts = [
            [rubric + item for item in maker.prompts(requests, item_tokens)] for rubric in maker.prompts(reps, length)
        ]

        def answer(engine: Engine, turn: int, prompts: list[list[list[int]]] = prompts) -> JudgeRun:
            engine.cache.clear()
            return run_requests(engine, prompts[turn])

        turns = kit.in_turns(engines, answer, reps)
        shared.append(
            {"requests": requests, "rubric_tokens": length, "item_tokens": item_tokens}
            | kit.compared({name: [run.seconds for run in runs] for name, runs in turns.items()})
            | {f"tokens_{name}": runs[-1].tokens_computed for name, runs in turns.items()}
            | {"identical": all(off.answers == on.answers for off, on in zip(*turns.values(), strict=True))}
        )
    same = all(figure["identical"] for figure in shared)
    return {**kit.about(llm), "repetitions": reps, "shared": shared, "identical": same}
