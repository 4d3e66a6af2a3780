"""12. Many engines: which of them has the prefix, and what a router knows.

[dim]forge cluster --only run --replicas 3 --requests 96[/dim]
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.text import Text

from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.trace.explain import explain_route
from forge.views.charts import bar
from forge.views.formatting import count, percent, plural
from forge.views.metrics import verdict
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, leads_on, question, report, title

if TYPE_CHECKING:
    from forge.cluster.local import LocalRun, Talk

_CLUSTER = "Engines"
SYSTEMS, TURNS = 12, 4
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 240, 24, 16
CLIENTS = 6
QUESTION = "Which engine computes what, by router?"
LEADS_ON = "The same routers in front of engines that run at once:\n  forge serve --replicas 2 --router prefix"
DECISIONS_SHOWN = 6
_BAR = 24


@dataclass(frozen=True)
class ClusterArgs:
    """The number of engines and their workload."""

    replicas: int = option(2, "Engines.", _CLUSTER)
    requests: int = option(96, "Of conversations with four turns.", _CLUSTER, flags="--requests -n")
    router: Sequence[str] = option((), "May be repeated.", _CLUSTER, shown="all of them")
    threshold: int | None = option(None, "Tokens that a prefix's holder may be busier by.", _CLUSTER, shown="512")
    part: Literal["routers", "scale", "apart", "failure", "measured"] = option(
        "routers",
        "routers on the same requests; scale, a simulation of up to 32; apart, prefill and decode; failure, an engine "
        "of a running server is killed; measured, two engines against one, and the simulator against them (both need "
        "Ray Serve).",
        _CLUSTER,
    )

    def __post_init__(self) -> None:
        from forge.cluster.routers import ROUTERS

        for name, value, least in (("--replicas", self.replicas, 1), ("--requests", self.requests, TURNS)):
            if value < least:
                raise UsageError(f"{name} is at least {least}, and {value} is less")
        for name in self.router:
            if name not in ROUTERS:
                raise UsageError(f"unknown router {name!r}; there are {', '.join(ROUTERS)}")


@experiment()
def cluster(
    asked: ClusterArgs,
    engine: Annotated[
        EngineArgs,
        Takes("model num_blocks", model="hash", kv="prefix", num_blocks=256, max_num_seqs=CLIENTS, threads=1),
    ],
) -> Experiment:
    def run() -> Report:
        if asked.part == "scale":
            from forge.experiments.cluster.scale import measure_scale

            return measure_scale(asked.router)
        if asked.part == "apart":
            from forge.experiments.cluster.apart import measure_apart

            return measure_apart("tales" if engine.model == "hash" else str(engine.model))
        if asked.part == "failure":
            from forge.experiments.cluster.failure import measure_failure

            return measure_failure(max(2, asked.replicas))
        if asked.part == "measured":
            from forge.experiments.cluster.measured import measure_replicas

            return measure_replicas()
        return _measure(engine, asked)

    return Experiment(run)


def talks(number: int, seed: int = 0) -> "list[Talk]":
    """Make conversations of `TURNS` turns that share a few system prompts. The words are random: only lengths matter
    here."""
    from forge.cluster.local import Talk

    random_ = random.Random(seed)
    systems = [_words(random_, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    return [
        Talk(systems[index % SYSTEMS], [_words(random_, USER_TOKENS) for _ in range(TURNS)]) for index in range(number)
    ]


def _words(random_: random.Random, length: int) -> list[int]:
    return [random_.choice(b"abcdefghijklmnopqrstuvwxyz ") for _ in range(length)]


def _measure(args: EngineArgs, asked: ClusterArgs) -> Report:
    from functools import partial

    from forge.cluster.local import run_talks
    from forge.cluster.routers import ROUTERS, PrefixRouter
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM

    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    num_blocks = args.num_blocks
    assert num_blocks is not None, "the command has a default"
    first = LLM.from_engine_args(args)
    num_talks, runs = asked.requests // TURNS, []
    with progress_line() as progress:
        progress("one engine")
        large = LLM.from_engine_args(replace(args, num_blocks=num_blocks * asked.replicas))
        alone = run_talks([large.engine], "round-robin", talks(num_talks), params, CLIENTS)
        for name in asked.router or ROUTERS:
            progress(name)
            chosen: Any = ROUTERS[name]
            if asked.threshold is not None and issubclass(chosen, PrefixRouter):
                chosen = partial(chosen, threshold=asked.threshold)
            engines = [first.new_engine() for _ in range(asked.replicas)]
            runs.append(run_talks(engines, chosen, talks(num_talks), params, CLIENTS))
    facts = routers_object(str(args.model), num_blocks, alone, runs)
    return report(facts, lambda: screen(facts, runs), 0 if facts["identical"] else 1)


def routers_object(model: str, num_blocks: int, alone: "LocalRun", runs: "Sequence[LocalRun]") -> dict[str, Any]:
    """Return the runs as facts. `alone` is one engine with a cache as large as all of theirs."""
    return {
        "model": model,
        "replicas": runs[0].replicas,
        "requests": len(alone.routed),
        "system_prompts": SYSTEMS,
        "num_blocks": num_blocks,
        "prompt_tokens": alone.prompt_tokens,
        "one_engine": {"tokens_computed": alone.computed_tokens, "hit_rate": alone.hit_rate},
        "compared": [run.router for run in runs],
        "routers": {
            run.router.replace("-", "_"): {
                "tokens_computed": run.computed_tokens,
                "hit_rate": run.hit_rate,
                "over_one_engine": run.computed_tokens / alone.computed_tokens,
                "requests": run.requests_by_replica,
                "computed": run.computed_by_replica,
                "busiest_over_mean": run.balance,
                "requests_over_mean": run.request_balance,
                "reasons": dict(Counter(request.decision.why for request in run.routed)),
                "believed_tokens": sum(request.decision.cached_tokens for request in run.routed),
                "believed_wrongly": sum(
                    request.decision.cached_tokens > request.cached_tokens for request in run.routed
                ),
                "decisions": [
                    asdict(request.decision) | {"prompt_tokens": request.prompt_tokens, "found": request.cached_tokens}
                    for request in run.routed
                ],
            }
            for run in runs
        },
        "identical": all(run.answers == alone.answers for run in runs),
    }


def screen(facts: dict[str, Any], runs: "Sequence[LocalRun]") -> Iterator[Part]:
    """Draw each router's totals, the tokens that each engine computed, and some decisions of a prefix-aware router."""
    most = max(max(run.computed_by_replica) for run in runs)
    yield from question(
        QUESTION,
        f"{plural(facts['requests'], 'request')}, {count(facts['prompt_tokens'])} prompt tokens, {SYSTEMS} system "
        f"prompts; {plural(facts['replicas'], 'engine')} of {facts['num_blocks']} blocks",
    )
    columns = ["router: {name}", "computed: {tokens_computed:count}", "found: {hit_rate:percent}"]
    columns += ["of one engine's: {over_one_engine:times}", "busiest / mean: {busiest_over_mean:.2f}"]
    one_engine = facts["one_engine"]
    table = Table.of(({**facts["routers"][run.router.replace("-", "_")], "name": run.router} for run in runs), *columns)
    figures = count(one_engine["tokens_computed"]), percent(one_engine["hit_rate"])
    yield from (replace(table, rows=[*table.rows, [Text("one engine", QUIET), *figures, "", ""]]), None)
    for run in runs:
        for number, computed in enumerate(run.computed_by_replica):
            label = run.router if number == 0 else ""
            line = Text.assemble((f"{label:<17}", QUIET), (f"{number} ", sequence_style(number)), no_wrap=True)
            line.append(bar(computed, most, _BAR), sequence_style(number))
            yield line.append(f" {count(computed)} of {plural(run.requests_by_replica[number], 'request')}", QUIET)
    yield None
    for run in [run for run in runs if any(request.decision.holder for request in run.routed)][:1]:
        yield from (*_decisions(run), None)
    yield verdict(facts["identical"], "every router, and one engine, give the same answers", "the answers differ")
    yield leads_on(LEADS_ON)


def _decisions(run: "LocalRun") -> Iterator[Part]:
    """Draw the first decisions of each kind, with their numbers."""
    yield title(f"Why, under {run.router}", f"{TITLE} {ACCENT}")
    seen: Counter[str] = Counter()
    for routed in sorted(run.routed, key=lambda request: int(request.decision.request_id)):
        decision = routed.decision
        seen[decision.why] += 1
        if seen[decision.why] <= DECISIONS_SHOWN // 3:
            line = Text(f"request {decision.request_id:>2} → engine {decision.replica}  ", no_wrap=True)
            yield line.append(explain_route(decision), QUIET)
