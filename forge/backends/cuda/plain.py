"""The operations of the interface, one by one, in torch: what the fused kernels are held against, on any torch device.

It computes at once, as `reference` does, and is written to be read beside it. It says what the kernels of `kernels/`
must compute, in the same dtypes: weights and activations in the backend's dtype, norms and softmax in float32, keys and
values in the storage's dtype. It has no graphs and launches a kernel per line, so on a GPU it also shows what a forward
pass costs before anything is fused.
"""

from dataclasses import dataclass

import numpy as np
import torch

from forge.backends.cuda.storage import Rotations, TorchKvStorage
from forge.backends.cuda.weights import Matrix
from forge.model.backend import Operations
from forge.model.forward_batch import ForwardBatch
from forge.model.rope import Rope


@dataclass(frozen=True)
class DeviceBatch:
    """A `ForwardBatch` whose arrays are on the device."""

    host: ForwardBatch
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, device: torch.device) -> "DeviceBatch":
        names = ("token_ids", "positions", "slot_mapping", "block_tables", "logit_rows")
        return cls(batch, *(torch.from_numpy(getattr(batch, name)).to(device).long() for name in names))


class TorchOperations(Operations):
    """Computes every operation at once, on torch tensors. Its batches are `DeviceBatch`es."""

    def __init__(self, rotations: Rotations):
        self._rotations = rotations

    def embed(self, table: Matrix, batch: DeviceBatch) -> torch.Tensor:
        return table.own_dense()[batch.token_ids]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalize in float32 over the last axis; the result has x's dtype."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return x @ matrix.own_dense().t()

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x.view(len(x), -1, len(weight)), weight, eps).view_as(x)

    def rope(self, x: torch.Tensor, batch: DeviceBatch, rope: Rope) -> torch.Tensor:
        self._rotations.reach(int(batch.host.context_lens.max()), rope)
        cos, sin = (table[batch.positions][:, None] for table in (self._rotations.cos, self._rotations.sin))
        first, second = x.float().view(len(x), -1, rope.head_dim).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.view_as(x).to(x.dtype)

    def write_kv(
        self, storage: TorchKvStorage, layer: int, batch: DeviceBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        token_shape = (-1, storage.layout.num_kv_heads, storage.layout.head_dim)
        for array, rows in ((storage.keys, keys), (storage.values, values)):
            array[layer].view(token_shape)[slots] = rows[written].view(token_shape).to(array.dtype)

    def attention(self, q: torch.Tensor, storage: TorchKvStorage, layer: int, batch: DeviceBatch) -> torch.Tensor:
        out = torch.empty_like(q)
        edges = batch.host.cu_seqlens.tolist()
        for sequence, length in enumerate(batch.host.context_lens.tolist()):
            rows = slice(edges[sequence], edges[sequence + 1])
            keys, values = storage.of_sequence(layer, batch.block_tables[sequence], length)
            out[rows] = _attend(q[rows], keys, values, batch.positions[rows])
        return out

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def logit_rows(self, x: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        return x[batch.logit_rows]

    def result(self, x: torch.Tensor) -> np.ndarray:
        return x.float().cpu().numpy()


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute softmax(q · Kᵀ / sqrt(head_dim)) · V in float32, each row over the keys up to its own position.

    q `[n, heads * head_dim]`; keys and values `[length, kv_heads, head_dim]` → `[n, heads * head_dim]`.
    """
    length, num_kv_heads, head_dim = keys.shape
    groups = q.float().view(len(q), num_kv_heads, -1, head_dim)
    scores = torch.einsum("nhgd,khd->hgnk", groups, keys.float()) * head_dim**-0.5
    seen = torch.arange(length, device=q.device) <= positions[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hgnk,khd->nhgd", weights, values.float()).reshape(q.shape).to(q.dtype)
