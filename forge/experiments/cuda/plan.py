"""What a step on the GPU has to do, worked out from a model's sizes: kernels, bytes, multiplications, and the least
time that a GPU of known limits needs for them. Nothing here is measured, and no GPU is needed.

The kernels are counted by running the real model on torch's `meta` device, where arrays have shapes and no memory, with
a counter in the launcher's place. So the count is of what would be launched.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import repeat

from forge.bench.cases import BLOCK_SIZE, CUDA_STEPS, Case
from forge.model.config import Qwen3Config

SHAPE = "qwen3-0.6b"
"""The published model whose steps are worked out, in bfloat16."""
BYTES = 2
"""Bytes of a weight, a key's number and an activation: bfloat16."""


@dataclass(frozen=True)
class Limits:
    """A GPU's peak rates."""

    device: str
    bytes_per_second: float
    operations_per_second: float
    """bfloat16 multiplications and additions, counted separately."""


H200 = Limits("NVIDIA H200", 4.8e12, 989e12)
"""The limits in its data sheet (SXM; dense, without sparsity)."""


@dataclass(frozen=True)
class PlannedStep:
    """The work of one step: rows, bytes, multiplications and launches."""

    name: str
    """`decode1@160`: one row with 160 tokens before it; `prefill128`."""
    title: str
    rows: int
    context: int
    bytes: int
    """Weights once, and the keys and values before the step."""
    operations: int
    """Multiplications and additions, counted separately."""
    launches: Mapping[str, int] | None
    """Kernel → how often it is launched; None where torch or Triton, which would be asked, is not installed."""

    @property
    def num_launches(self) -> int | None:
        return sum(self.launches.values()) if self.launches is not None else None

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def floor_ms(self, limits: Limits) -> float:
        """Return the least milliseconds that the step can take on a GPU of these limits; most steps take longer."""
        return max(self.bytes / limits.bytes_per_second, self.operations / limits.operations_per_second) * 1e3

    def is_bound_by_memory(self, limits: Limits) -> bool:
        return self.bytes / limits.bytes_per_second >= self.operations / limits.operations_per_second


def planned_steps(config: Qwen3Config) -> tuple[PlannedStep, ...]:
    """Plan the steps that `forge bench cuda` measures."""
    can_count = find_spec("torch") is not None and find_spec("triton") is not None
    launches = _launches(config) if can_count else repeat(None)
    return tuple(_planned(case, config, next(launches)) for case in CUDA_STEPS)


def num_weights(config: Qwen3Config) -> int:
    """Count the weights of all matrices that a row is multiplied with, including the output head."""
    layer = (config.query_size + 2 * config.key_value_size) * config.hidden_size
    layer += config.hidden_size * config.query_size + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _planned(case: Case, config: Qwen3Config, launches: Mapping[str, int] | None) -> PlannedStep:
    """Plan one step; a prompt needs the logits of its last token."""
    head = config.vocab_size * config.hidden_size
    layers, rows, new = num_weights(config) - head, case.tokens_per_step, case.tokens
    seen = case.sequences * (new * case.context + new * (new + 1) // 2)  # pairs of a row and a key
    held = case.sequences * case.context * 2 * config.key_value_size * config.num_layers
    num_bytes = BYTES * (layers + head + held)
    operations = 2 * (layers * rows + head * case.sequences) + 4 * config.query_size * config.num_layers * seen
    return PlannedStep(case.name, case.title, rows, case.context, num_bytes, operations, launches)


def _launches(config: Qwen3Config) -> Iterator[dict[str, int]]:
    """Yield what each step would launch, counted with a model on the `meta` device."""
    from forge.backends.cuda.ahead_of_time import CountedProducts, label, weightless_model
    from forge.backends.cuda.backend import CudaBackend
    from forge.backends.cuda.launches import ListingLauncher
    from forge.bench.forge_worker import batch_of
    from forge.gguf import GGMLType

    listing = ListingLauncher(dependent=False)
    model = weightless_model(config, GGMLType.BF16, listing)
    assert isinstance(model.backend, CudaBackend)
    for case in CUDA_STEPS:
        blocks = -(-case.length // BLOCK_SIZE)
        batch = batch_of([[0] * case.tokens] * case.sequences, case.context, blocks)
        layout = model.kv_layout(case.sequences * blocks, BLOCK_SIZE, "bfloat16")
        listing.found.clear()
        counts, products = Counter[str](), Counter[str]()
        with CountedProducts(products):
            model.backend.launch(model.forward_pass, batch, model.backend.new_storage(layout))
        for launch, times in listing.found.items():
            counts[label(launch)] += times
        yield counts | products
