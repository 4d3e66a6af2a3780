"""`forge bench engine`: the batching chapter's experiment with sizes of one's own, speculation included."""

from dataclasses import replace
from typing import Annotated

import typer

from forge.bench import kit
from forge.cli.arguments import Takes, command, make, stated
from forge.cli.options import RequestArgs, parse_numbers
from forge.engine_args import EngineArgs
from forge.experiments.batching import measure_ways
from forge.option import check_needs
from forge.views.screen import Report
from forge.workload.ways import How


@command
def bench_engine(
    ctx: typer.Context,
    asked: Annotated[RequestArgs, Takes("requests prompt_tokens max_tokens seed")],
    batch: Annotated[str, typer.Option(help="Sequences at once, with commas.")] = "4,16",
    *,
    engine: Annotated[
        EngineArgs, Takes("model kv device threads num_blocks speculate draft k", kv="paged", unmade=True)
    ],
    reps: Annotated[int, typer.Option(help="Turns of each way; the median counts.")] = 3,
) -> Report:
    """Requests one after another, in static batches and continuously: tokens/s, ms per request, latency.

    sequential makes a fresh engine for each request; loading the weights is not counted. With --draft or --speculate
    each size also runs with K draft tokens in every cycle.

    [dim]forge bench engine --requests 64 --prompt-tokens 16 --max-tokens 64[/dim]

    [dim]forge bench engine -m hash --draft hash:0.8[/dim]
    """
    sizes = parse_numbers(batch, "--batch", "4,16", "numbers of sequences")
    kit.at_least_one(reps=reps)
    values, names, spelled = stated(ctx, ctx.params)
    values["speculate"] = values["speculate"] or ("draft" if values["draft"] else "off")
    check_needs(values, names, spelled)
    engine = make(EngineArgs, values)
    speculates = engine.speculate != "off"
    hows: tuple[How, ...] = ("static", "continuous", "speculative") if speculates else ("static", "continuous")
    ways: list[tuple[How, int]] = [("sequential", 1), *((how, size) for size in sizes for how in hows)]
    engine = replace(engine, speculate_fixed=speculates)
    return measure_ways(engine, asked, ways, reps)
