"""What a forward pass waits for: the same model with more and more rows, held against what the machine can do at most.

A pass reads every weight once, however many rows it computes, and multiplies every weight with every row. So the bytes
stay and the products grow, and somewhere the one limit takes over from the other (Williams, Waterman and Patterson
2009, *Roofline*). The machine's limits are those of `limits_worker`, the bytes and products of a pass those of `cases`.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from forge.bench.cases import Case, Limits, ModelSize, measure_model, needs_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPE_LAYERS = 8
VOCABULARY = 4096
"""Of the model that is made up: some layers of Qwen3-0.6B, 130 million weights, more than a processor's cache holds."""
DEFAULT_TYPES = ("Q8_0", "Q4_0")
ROUNDS, ROUND_SECONDS = 4, 0.02
"""Each number of rows has its turn this often, and takes this long or one pass. The shortest pass counts: whatever else
the machine does can only add time, and a burst of it does not last for all turns."""
LIMIT_SECONDS = 0.2
ARRAY_BYTES = 1 << 28

Progress = Callable[[str], None]
"""Called with what is about to be done."""
Work = tuple[Case, Callable[[], object]]


@dataclass(frozen=True)
class Pass:
    """Forward passes with one number of rows."""

    rows: int
    bytes_read: int
    products: int
    seconds: float
    """The shortest's."""

    @property
    def intensity(self) -> float:
        """Products per byte."""
        return self.products / self.bytes_read

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds

    @property
    def products_per_second(self) -> float:
        return self.products / self.seconds

    def bound(self, limits: Limits) -> Literal["memory", "arithmetic"]:
        """Which limit is nearer."""
        return "memory" if self.intensity < limits.ridge else "arithmetic"

    def share(self, limits: Limits) -> float:
        """How much of the nearer limit is used; more than 1 where weights come from a cache and not from memory."""
        by_memory = self.bytes_per_second / limits.bytes_per_second
        by_arithmetic = self.products_per_second / limits.products_per_second
        return by_memory if self.bound(limits) == "memory" else by_arithmetic


@dataclass(frozen=True)
class Measured:
    """One model."""

    name: str
    size: ModelSize
    threads: int
    passes: tuple[Pass, ...]
    """By rising number of rows; the first has one."""

    def pass_of(self, rows: int) -> Pass:
        return next(found for found in self.passes if found.rows == rows)


@dataclass(frozen=True)
class KernelsResult:
    """The results of `forge bench kernels`."""

    limits: Limits
    models: tuple[Measured, ...]
    load_average: float | None = None
    """Of the minute before, where the system tells: how many processes wanted a CPU."""


def run(
    model: str | None,
    types: Sequence[str] = DEFAULT_TYPES,
    threads: int | None = None,
    on_progress: Progress = lambda text: None,
) -> KernelsResult:
    """Measure the machine and `model`, or, without one, a model that is made up in each of `types`.

    The files that are made up lie in a temporary folder and are gone afterwards. Raises `UsageError` for a model or a
    type that does not exist.
    """
    from forge.model.catalog import resolve_model
    from forge.model.synth import find_quantization

    for name in types:
        find_quantization(name)
    path = resolve_model(model) if model is not None else None
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    on_progress("what this machine can do")
    before = _limits(threads)
    measured = []
    if path is not None:
        measured.append(_measure(path, threads, on_progress))
    for name in types if path is None else ():
        on_progress(f"making up a model in {name}")
        with _made_up(name) as path:
            measured.append(_measure(path, threads, on_progress))
    on_progress("what this machine can do, once more")
    return KernelsResult(before.or_better(_limits(threads)), tuple(measured), load_average)


def _limits(threads: int | None) -> Limits:
    from forge.backends.cpu.features import usable_cpus
    from forge.bench.limits_worker import product_rate, read_bandwidth

    threads = threads or usable_cpus()
    return Limits(read_bandwidth(ARRAY_BYTES, LIMIT_SECONDS, threads), product_rate(LIMIT_SECONDS, threads))


@contextmanager
def _made_up(quantization: str) -> Iterator[Path]:
    from forge.model.synth import SHAPES, synth, synthetic_config

    shape = SHAPES["qwen3-0.6b"]
    config = synthetic_config(
        num_layers=SHAPE_LAYERS,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=VOCABULARY,
    )
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        path = Path(folder) / f"random-{quantization.lower()}.gguf"
        synth(path, config, quantization, pure=True)
        yield path


def _measure(path: Path, threads: int | None, on_progress: Progress) -> Measured:
    from forge.backends.cpu.backend import CpuBackend
    from forge.bench.forge_worker import BLOCK_SIZE, batch_of
    from forge.llm import LLM
    from forge.model.catalog import model_name
    from forge.model.qwen3 import Qwen3

    size = measure_model(path)
    most = min(ROWS[-1], size.max_context)
    llm = LLM(path, device="cpu", threads=threads, max_model_len=most, max_num_seqs=1, block_size=BLOCK_SIZE)
    blocks = -(-most // BLOCK_SIZE)
    storage = llm.model.new_storage(llm.model.kv_layout(blocks, BLOCK_SIZE, llm.kv_dtype))
    works: list[Work] = []
    for rows in (rows for rows in ROWS if rows <= most):
        case = Case(f"rows{rows}", f"{rows} rows", "prefill", sequences=1, context=0, tokens=rows)
        batch = batch_of(case.token_ids(size.vocab_size, seed=1), 0, blocks)
        works.append((case, partial(llm.model.forward, batch, storage)))
    seconds = _shortest([work for _, work in works], lambda turn: on_progress(f"{model_name(path)}: {turn}"))
    passes = []
    for (case, _), shortest in zip(works, seconds, strict=True):
        needs = needs_of(case, size)
        passes.append(Pass(case.tokens, needs.bytes_read, needs.products, shortest))
    assert isinstance(llm.model, Qwen3) and isinstance(llm.model.backend, CpuBackend)
    return Measured(model_name(path), size, llm.model.backend.threads, tuple(passes))


def _shortest(works: Sequence[Callable[[], object]], on_progress: Progress) -> list[float]:
    """The seconds of the shortest pass of each, after one that is not counted."""
    shortest = [math.inf] * len(works)
    for work in works:
        work()
    for turn in range(ROUNDS):
        on_progress(f"{turn + 1} of {ROUNDS}")
        for index, work in enumerate(works):
            spent = 0.0
            while spent < ROUND_SECONDS:
                started = time.perf_counter()
                work()
                taken = time.perf_counter() - started
                spent += taken
                shortest[index] = min(shortest[index], taken)
    return shortest
