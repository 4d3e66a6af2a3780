"""`forge bench engine`: the batching chapter's experiment with sizes of one's own, guesses ahead included."""

from typing import Annotated

import typer

from forge.cli import options
from forge.cli.run_control import Found
from forge.errors import UsageError
from forge.experiments.batching import measure_ways
from forge.workload.ways import How


def bench_engine(
    model: options.ModelOption = "tales",
    requests: Annotated[int, typer.Option("--requests", "-n", help="How many requests.")] = 64,
    prompt_tokens: options.PromptTokensOption = "16",
    max_tokens: options.OutputTokensOption = "64",
    seed: options.WorkloadSeedOption = 0,
    batch: Annotated[str, typer.Option(help="Sequences at once, with commas.")] = "4,16",
    kv: options.KvOption = "paged",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    speculate: options.SpeculateOption = None,
    draft: options.DraftOption = None,
    k: options.KOption = None,
    reps: Annotated[int, typer.Option(help="Turns of each way; the median counts.")] = 3,
    json: options.JsonOption = False,
) -> Found:
    """Requests one after another, in static batches and continuously: tokens/s, ms per request, latency.

    sequential makes a fresh engine for each request; loading the weights is not counted. With --draft or --speculate
    each size also runs with K guesses in every cycle.

    [dim]forge bench engine --requests 64 --prompt-tokens 16 --max-tokens 64[/dim]

    [dim]forge bench engine -m hash --draft hash:0.8[/dim]
    """
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in batch.split(",")]
    if min(sizes) < 1 or reps < 1:
        raise UsageError("--batch takes numbers of sequences with commas, such as 4,16, and --reps at least 1")
    speculate = speculate or ("draft" if draft else None)
    options.check_speculation(speculate, draft, k)
    speculation = {"speculate": speculate, "draft": draft, "k": k, "speculate_fixed": speculate is not None}
    loading = options.model_options(kv=kv, device=device, threads=threads, num_blocks=num_blocks, **speculation)
    hows: tuple[How, ...] = ("static", "continuous", "speculative")
    hows = hows if speculate not in (None, "off") else hows[:2]
    ways: list[tuple[How, int]] = [("sequential", 1), *((how, size) for size in sizes for how in hows)]
    report = measure_ways(model, loading, (requests, prompt_tokens, max_tokens, seed), ways, reps)
    return report.as_json() if json else report
