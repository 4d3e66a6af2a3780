"""12. Many engines: which of them has the prefix, and what a router knows.

[dim]forge cluster --only run --replicas 3 --requests 96[/dim]
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.run_control import Found
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.trace.explain import explain_route
from forge.views.charts import bar
from forge.views.formatting import count, percent, plural, times
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.progress import BenchProgress
from forge.views.report import Report
from forge.views.terminal import new_table, open_error_console, print_lines, print_table

if TYPE_CHECKING:
    from forge.cluster.local import LocalRun, Talk

_CLUSTER = "Engines"
Part = Literal["routers", "scale", "apart", "failure"]
SYSTEMS, TURNS = 12, 4
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 240, 24, 16
CLIENTS = 6
QUESTION = "Which engine computes what, by router?"
LEADS_ON = "The same routers in front of engines that run at once:\n  forge serve --replicas 2 --router prefix"
DECISIONS_SHOWN = 6
_BAR = 24


@command
def cluster(
    ctx: typer.Context,
    replicas: Annotated[int, typer.Option("--replicas", help="Engines.", rich_help_panel=_CLUSTER)] = 2,
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="Of conversations with four turns.", rich_help_panel=_CLUSTER)
    ] = 96,
    router: Annotated[
        list[str] | None,
        typer.Option("--router", help="May be repeated.", show_default="all of them", rich_help_panel=_CLUSTER),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(
            "--threshold",
            help="Tokens that a prefix's holder may be busier by.",
            show_default="512",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    part: Annotated[
        Part,
        typer.Option(
            "--part",
            help="routers on the same requests; scale, a simulation of up to 64; apart, prefill and decode; failure, "
            "an engine of a running server is killed (Ray Serve).",
            rich_help_panel=_CLUSTER,
        ),
    ] = "routers",
    *,
    engine: Annotated[
        EngineArgs,
        Takes("model num_blocks", model="hash", kv="prefix", num_blocks=256, max_num_seqs=CLIENTS, threads=1),
    ],
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    from forge.cluster.routers import ROUTERS

    for name, value, least in (("--replicas", replicas, 1), ("--requests", requests, TURNS)):
        if value < least:
            raise UsageError(f"{name} is at least {least}, and {value} is less")
    unknown = [name for name in router or () if name not in ROUTERS]
    if unknown:
        raise UsageError(f"unknown router {unknown[0]!r}; there are {', '.join(ROUTERS)}")
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    if part == "scale":
        from forge.experiments.cluster.scale import measure_scale

        report = measure_scale(router)
    elif part == "apart":
        from forge.experiments.cluster.apart import measure_apart

        report = measure_apart("tales" if engine.model == "hash" else str(engine.model))
    elif part == "failure":
        from forge.experiments.cluster.failure import measure_failure

        report = measure_failure(max(2, replicas))
    else:
        report = _measure(engine, replicas, requests // TURNS, router, threshold)
    return report.as_json() if json else report


def talks(number: int, seed: int = 0) -> "list[Talk]":
    """Conversations of `TURNS` turns, which share a few system prompts. Words without a meaning: lengths are what
    counts here."""
    from forge.cluster.local import Talk

    random_ = random.Random(seed)
    systems = [_words(random_, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    return [Talk(systems[one % SYSTEMS], [_words(random_, USER_TOKENS) for _ in range(TURNS)]) for one in range(number)]


def _words(random_: random.Random, length: int) -> list[int]:
    return [random_.choice(b"abcdefghijklmnopqrstuvwxyz ") for _ in range(length)]


def _measure(
    args: EngineArgs, replicas: int, num_talks: int, routers: list[str] | None, threshold: int | None
) -> Report:
    from functools import partial

    from forge.cluster.local import run_talks
    from forge.cluster.routers import ROUTERS, PrefixRouter
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM

    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    num_blocks = args.num_blocks
    assert num_blocks is not None, "the command has a default"
    first = LLM.from_engine_args(args)
    runs = []
    with BenchProgress(open_error_console()) as progress:
        progress("one engine")
        large = LLM.from_engine_args(replace(args, num_blocks=num_blocks * replicas))
        alone = run_talks([large.engine], "round-robin", talks(num_talks), params, CLIENTS)
        for name in routers or ROUTERS:
            progress(name)
            chosen: Any = ROUTERS[name]
            if threshold is not None and issubclass(chosen, PrefixRouter):
                chosen = partial(chosen, threshold=threshold)
            engines = [first.new_engine() for _ in range(replicas)]
            runs.append(run_talks(engines, chosen, talks(num_talks), params, CLIENTS))
    facts = routers_object(str(args.model), num_blocks, alone, runs)
    return Report(facts, lambda console: print_routers(console, facts, runs), 0 if facts["identical"] else 1)


def routers_object(model: str, num_blocks: int, alone: "LocalRun", runs: "Sequence[LocalRun]") -> dict[str, Any]:
    """The runs as facts. `alone` is one engine with a cache as large as all of theirs."""
    return {
        "model": model,
        "replicas": runs[0].replicas,
        "requests": len(alone.routed),
        "system_prompts": SYSTEMS,
        "num_blocks": num_blocks,
        "prompt_tokens": alone.prompt_tokens,
        "one_engine": {"tokens_computed": alone.computed_tokens, "hit_rate": alone.hit_rate},
        "routers": {
            run.router.replace("-", "_"): {
                "tokens_computed": run.computed_tokens,
                "hit_rate": run.hit_rate,
                "over_one_engine": run.computed_tokens / alone.computed_tokens,
                "requests": run.requests_by_replica,
                "computed": run.computed_by_replica,
                "busiest_over_mean": run.balance,
                "requests_over_mean": run.request_balance,
                "reasons": {
                    why: sum(one.decision.why == why for one in run.routed)
                    for why in dict.fromkeys(one.decision.why for one in run.routed)
                },
                "believed_tokens": sum(one.decision.cached_tokens for one in run.routed),
                "believed_wrongly": sum(one.decision.cached_tokens > one.cached_tokens for one in run.routed),
                "decisions": [
                    asdict(one.decision) | {"prompt_tokens": one.prompt_tokens, "found": one.cached_tokens}
                    for one in run.routed
                ],
            }
            for run in runs
        },
        "identical": all(run.answers == alone.answers for run in runs),
    }


def print_routers(console: Console, facts: dict[str, Any], runs: "Sequence[LocalRun]") -> None:
    """Each router's totals, what each engine computed, and some decisions of a router that knows prefixes."""
    one, most = facts["one_engine"], max(max(run.computed_by_replica) for run in runs)
    console.print(Text(QUESTION, TITLE))
    head = (
        f"{plural(facts['requests'], 'request')}, {count(facts['prompt_tokens'])} prompt tokens, {SYSTEMS} system "
        f"prompts; {plural(facts['replicas'], 'engine')} of {facts['num_blocks']} blocks"
    )
    print_lines(console, [Text(head, QUIET), Text("")])
    table = new_table("router", "computed", "found", "of one engine's", "busiest / mean")
    for run in runs:
        found = facts["routers"][run.router.replace("-", "_")]
        table.add_row(
            run.router,
            count(run.computed_tokens),
            percent(run.hit_rate),
            times(found["over_one_engine"]),
            f"{run.balance:.2f}",
        )
    table.add_row(Text("one engine", QUIET), count(one["tokens_computed"]), percent(one["hit_rate"]), "", "")
    print_table(console, table)
    console.print()
    for run in runs:
        for number, computed in enumerate(run.computed_by_replica):
            label = run.router if number == 0 else ""
            line = Text.assemble((f"{label:<17}", QUIET), (f"{number} ", sequence_style(number)), no_wrap=True)
            line.append(bar(computed, most, _BAR), sequence_style(number))
            line.append(f" {count(computed)} of {plural(run.requests_by_replica[number], 'request')}", QUIET)
            console.print(line)
    console.print()
    knowing = [run for run in runs if any(one.decision.holder for one in run.routed)]
    if knowing:
        _print_decisions(console, knowing[0])
    if facts["identical"]:
        console.print(Text.assemble(("✓ identical", GOOD), ": every router, and one engine, give the same answers"))
    else:
        console.print(Text("✗ the answers differ", TROUBLE))
    print_lines(console, [Text(""), Text(LEADS_ON, ACCENT)])


def _print_decisions(console: Console, run: "LocalRun") -> None:
    """The first decisions of each kind, with their numbers."""
    console.print(Text(f"Why, under {run.router}", f"{TITLE} {ACCENT}"))
    shown: list[Text] = []
    seen: dict[str, int] = {}
    for routed in sorted(run.routed, key=lambda one: int(one.decision.request_id)):
        decision = routed.decision
        seen[decision.why] = seen.get(decision.why, 0) + 1
        if seen[decision.why] <= DECISIONS_SHOWN // 3:
            line = Text(f"request {decision.request_id:>2} → engine {decision.replica}  ", no_wrap=True)
            shown.append(line.append(explain_route(decision), QUIET))
    print_lines(console, [*shown, Text("")])
