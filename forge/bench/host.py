"""`forge bench host`: what a step costs beside its forward pass: planning it, laying out its batch, choosing tokens,
writing its record.

Measured with `HashModel`, whose forward leaves the processor's caches nearly as they were, on sequences that all
decode: step by step the wall time of `Engine.step` less that of the forward pass within it. The bar is 60 µs and 6 µs
more per sequence.
"""

import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Annotated

import numpy as np

from forge.bench.kit import Facts, Progress, benchmark, option
from forge.cli.arguments import Takes
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.llm import LLM
from forge.views.screen import Part, Table, title

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 64
BAR_US, BAR_PER_SEQUENCE_US = 60.0, 6.0


def screen(facts: Facts) -> Iterator[Part]:
    """Draw the figures. schedule: planning, and laying out the batch. sample: from logits to tokens and text. record:
    what is left: the scheduler's and the cache's commit, accounts, the step's record."""
    yield title("What does a step cost beside its forward pass?")
    steps = facts["steps"][0]["steps"]
    yield f"decode steps of the hash model on {facts['machine']}, {steps} of each; microseconds\n"
    heads = {"median": "median", "least": "least", "9 of 10 below": "ninth_decile", "plan and batch": "schedule"}
    heads |= {"choose": "sample", "commit and record": "record", "bar": "bar"}
    columns = [f"{head}: {{{name}:,.0f}}" for head, name in heads.items()]
    yield Table.of(facts["steps"], "sequences: {sequences}", *columns, names=0, wraps=True)


@benchmark(screen)
def bench_host(
    say: Progress,
    engine: Annotated[EngineArgs, Takes("kv", kv="paged")],
    steps: Annotated[int, option("Steps per figure.", min=2)] = 200,
) -> Facts:
    """What a step costs beside its forward pass: planning, sampling, records; with 1, 4, 16 and 64 sequences."""
    return {"steps": [measure(str(engine.cache), sequences, steps) for sequences in BATCHES]}


def measure(kv: str, sequences: int, steps: int) -> Facts:
    """Return the microseconds of a decode step. Every sequence's prompt is its own: nothing is shared."""
    max_tokens = steps + sequences + 1  # prompts are computed one after another, and none may end before the last step
    length = PROMPT_TOKENS + max_tokens
    num_blocks = None if kv == "off" else sequences * (length // 16 + 1)
    llm = LLM("hash", kv=kv, max_num_seqs=sequences, max_model_len=length, num_blocks=num_blocks)
    prompts = np.random.default_rng(0).integers(0, 256, (sequences, PROMPT_TOKENS)).tolist()
    run = llm.start(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while any(sequence.num_output_tokens == 0 for sequence in llm.engine.scheduler.unfinished()):
        llm.engine.step()
    spent: list[tuple[float, float, float, float]] = []
    for _ in range(steps):
        started = time.perf_counter()
        record = llm.engine.step()
        total = (time.perf_counter() - started) * 1e3 - record.forward_ms
        spent.append((total, record.schedule_ms, record.sample_ms, total - record.schedule_ms - record.sample_ms))
    run.abort()
    totals, *parts = [[value * 1e3 for value in column] for column in zip(*spent, strict=True)]
    times = {"least": min(totals), "median": median(totals), "ninth_decile": quantiles(totals, n=10)[-1]}
    times |= dict(zip(("schedule", "sample", "record"), map(median, parts), strict=True))
    return {"sequences": sequences, "steps": steps} | times | {"bar": BAR_US + BAR_PER_SEQUENCE_US * sequences}
