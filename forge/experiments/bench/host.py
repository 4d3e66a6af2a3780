"""`forge bench host`: what a step costs beside its forward pass: planning it, laying out its batch, choosing tokens,
writing its record.

Measured with `HashModel`, whose forward leaves the processor's caches nearly as they were, on sequences that all
decode: step by step the wall time of `Engine.step` less that of the forward pass within it. The bar is 60 µs and 6 µs
more per sequence.
"""

import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Annotated

import numpy as np

from forge.cli import machine, options
from forge.cli.arguments import Takes, command
from forge.cli.run_control import Found
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.experiments.bench.options import option
from forge.experiments.bench.results import Facts, shown
from forge.experiments.bench.tables import Part, Table, title
from forge.llm import LLM

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 64
STEPS = 200
BAR_US, BAR_PER_SEQUENCE_US = 60.0, 6.0


@command
def bench_host(
    engine: Annotated[EngineArgs, Takes("kv", kv="paged")],
    steps: Annotated[int, option("Steps per figure.", min=2)] = STEPS,
    json: options.JsonOption = False,
) -> Found:
    """What a step costs beside its forward pass: planning, sampling, records; with 1, 4, 16 and 64 sequences."""
    facts = {"steps": measure(str(engine.cache), steps=steps)}
    return shown(facts, screen(facts | {"machine": machine.cpu_model()}), json)


def measure(kv: str = "paged", batches: Sequence[int] = BATCHES, steps: int = STEPS) -> list[Facts]:
    """Per batch size the microseconds of a decode step. Every sequence's prompt is its own: nothing is shared."""
    return [_measure(kv, sequences, steps) for sequences in batches]


def _measure(kv: str, sequences: int, steps: int) -> Facts:
    max_tokens = steps + sequences + 1  # prompts are computed one after another, and none may end before the last step
    length = PROMPT_TOKENS + max_tokens
    llm = LLM("hash", kv=kv, max_num_seqs=sequences, max_model_len=length, num_blocks=sequences * (length // 16 + 1))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (sequences, PROMPT_TOKENS)).tolist()
    run = llm.start(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    engine = llm.engine
    while any(one.num_output_tokens == 0 for one in engine.scheduler.unfinished()):
        engine.step()
    spent: list[tuple[float, float, float, float]] = []
    for _ in range(steps):
        started = time.perf_counter()
        record = engine.step()
        total = (time.perf_counter() - started) * 1e3 - record.forward_ms
        spent.append((total, record.schedule_ms, record.sample_ms, total - record.schedule_ms - record.sample_ms))
    run.abort()
    totals, *parts = [[each * 1e3 for each in column] for column in zip(*spent, strict=True)]
    return {
        "sequences": sequences,
        "steps": steps,
        "least": min(totals),
        "median": median(totals),
        "ninth_decile": quantiles(totals, n=10)[-1],
        **dict(zip(("schedule", "sample", "record"), map(median, parts), strict=True)),
        "bar": BAR_US + BAR_PER_SEQUENCE_US * sequences,
    }


def screen(facts: Facts) -> Iterator[Part]:
    """schedule: planning, and laying out the batch. sample: from logits to tokens and text. record: what is left: the
    scheduler's and the cache's commit, accounts, the step's record."""
    times = facts["steps"]
    yield title("What does a step cost beside its forward pass?")
    yield f"decode steps of the hash model on {facts['machine']}, {times[0]['steps']} of each; microseconds\n"
    headings = ("sequences", "median", "least", "9 of 10 below", "plan and batch", "choose", "commit and record", "bar")
    names = ("median", "least", "ninth_decile", "schedule", "sample", "record", "bar")
    rows = [[str(one["sequences"]), *(f"{one[name]:,.0f}" for name in names)] for one in times]
    yield Table(headings, rows, names=0, wraps=True)
