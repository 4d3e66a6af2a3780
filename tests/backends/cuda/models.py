"""Operands for single kernels, and how far results may be apart."""

import numpy as np
import torch

from forge.backends.cuda.backend import DEPENDENT_LAUNCH
from forge.backends.cuda.launches import Launches, TritonLauncher
from forge.backends.cuda.network import Network
from forge.backends.cuda.sampling import SamplingRows, sample_into
from forge.backends.cuda.shapes import DEFAULT_TUNING, Policy, Tuning
from forge.backends.cuda.storage import Rotations
from forge.backends.cuda.weights import Matrix, load_matrix
from tests.backends.cpu.models import memory_tensor, random_bytes

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative error of one operation against float64, by the dtype of weights and activations."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_K": 144}


def relative_error(got, want) -> float:
    got, want = (x.double().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (got, want))
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def launches(
    device: str,
    dtype: str,
    network: Network | None = None,
    *,
    invariant: bool = False,
    heads: int = 1,
    kv_heads: int = 1,
    multiprocessors: int = 2,
    dependent: bool | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> Launches:
    """The steps without a model around them. dependent: None for where the device has dependent launches."""
    network = network or Network(None, (), None, heads, kv_heads, head_dim=1, rope=None)
    policy = Policy(heads, kv_heads, multiprocessors, invariant, buckets=False, tuning=tuning)
    where = torch.device(device)
    if dependent is None:
        dependent = where.type == "cuda" and torch.cuda.get_device_capability(where) >= DEPENDENT_LAUNCH
    return Launches(network, policy, Rotations(where), where, DTYPES[dtype], TritonLauncher(dependent))


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token of each row, drawn on the logits' device."""
    samples = torch.empty((len(logits), 2), dtype=torch.int32, device=logits.device)
    sample_into(logits, rows, samples, TritonLauncher(False))
    return samples[:, 0].long()


def random_matrix(kind: str, rows: int, columns: int, dtype: str, device: str, rng: np.random.Generator) -> Matrix:
    """A random matrix of a GGUF type, loaded as the backend loads it."""
    if kind in BLOCK_BYTES:
        data = random_bytes(kind, (rows, columns), rng)
        blocks = data.reshape(-1, BLOCK_BYTES[kind])
        for at in (0, 2) if kind == "Q4_K" else (0,):  # scales of ordinary size, and of both signs
            scales = rng.uniform(-0.02, 0.03, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    else:
        data = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
    tensor = memory_tensor("blk.0.ffn_down.weight", kind, data)
    return load_matrix(tensor, torch.device(device), DTYPES[dtype], keep_packed=True)


def exact_values(matrix: Matrix) -> torch.Tensor:
    """What the matrix stands for, float64."""
    return (matrix.dense if matrix.packed is None else matrix.packed.dense(torch.float32)).double().cpu()


def random_activations(rows: int, width: int, dtype: str, device: str, rng: np.random.Generator) -> torch.Tensor:
    values = rng.standard_normal((rows, width), dtype=np.float32)
    return torch.from_numpy(values).to(device).to(DTYPES[dtype])
