"""What a step costs beside its forward pass: planning it, laying out its batch, choosing tokens, writing its record.

Measured with `HashModel`, whose forward leaves the processor's caches nearly as they were, on sequences that all
decode: step by step the wall time of `Engine.step` less that of the forward pass within it. The bar is 60 µs and 6 µs
more per sequence.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import numpy as np

from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 64
STEPS = 200
BAR_US, BAR_PER_SEQUENCE_US = 60.0, 6.0


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a decode step with so many sequences, over `steps` steps."""

    sequences: int
    steps: int
    least: float
    median: float
    ninth_decile: float
    schedule: float
    """Planning, and laying out the batch; the median, as below."""
    sample: float
    """From logits to tokens and text."""
    record: float
    """What is left: the scheduler's and the cache's commit, accounts, the step's record."""

    @property
    def bar(self) -> float:
        return BAR_US + BAR_PER_SEQUENCE_US * self.sequences


def measure(kv: str = "paged", batches: Sequence[int] = BATCHES, steps: int = STEPS) -> list[HostTime]:
    """One figure per batch size. Every sequence's prompt is its own, so that nothing is shared."""
    return [_measure(kv, sequences, steps) for sequences in batches]


def _measure(kv: str, sequences: int, steps: int) -> HostTime:
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
    return HostTime(sequences, steps, min(totals), median(totals), quantiles(totals, n=10)[-1], *map(median, parts))
