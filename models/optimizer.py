"""Muon for the matrices of the blocks, AdamW for the rest, as one optimizer with one state to save.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by a Newton-Schulz iteration. Matrices
of one shape are iterated together, in bfloat16, each worker thread with a share of them. An update of the target costs 0.44 CPU
seconds on a Zen 4, as much as 700 tokens of gradients, and at 130 GFLOP/s is bound by the products: larger batches are the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM, ITERATIONS = 0.95, 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
SPECTRAL_TO_RMS = 0.2  # an update has the size that one of AdamW has (Liu et al. 2025, arXiv 2502.16982)


def orthogonalize(matrices: Tensor) -> Tensor:
    """matrices [count, rows, columns] -> about U V^T of each one's singular value decomposition, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.transpose(1, 2)


class Optimizer:
    """Updates `model` from the gradients in its parameters. `pool` has `workers` threads for the matrices."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float, weight_decay: float) -> None:
        self.matrix_rate, self.other_rate, self.weight_decay = matrix_rate, other_rate, weight_decay
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            shapes[matrix.shape].append(matrix)
        self.groups = list(shapes.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, factor: float, pool: Executor, workers: int) -> None:
        """One update with both learning rates scaled by `factor`."""
        pieces = [
            piece
            for group, momentum in zip(self.groups, self.momenta, strict=True)
            for piece in split(group, momentum, workers)
        ]
        list(pool.map(lambda piece: self._update(*piece, factor), pieces))
        self.adam.param_groups[0]["lr"] = self.other_rate * factor
        self.adam.step()

    @torch.no_grad()
    def _update(self, matrices: list[Tensor], momentum: Tensor, factor: float) -> None:
        gradients = torch.stack([matrix.grad for matrix in matrices])
        momentum.lerp_(gradients, 1 - MOMENTUM)
        update = orthogonalize(gradients.lerp_(momentum, MOMENTUM)).float()
        rate = self.matrix_rate * factor
        scale = rate * SPECTRAL_TO_RMS * max(matrices[0].shape) ** 0.5
        for matrix, change in zip(matrices, update, strict=True):
            matrix.mul_(1 - rate * self.weight_decay).sub_(change, alpha=scale)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.momenta, state["momenta"], strict=True):
            own.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def split(group: list[Tensor], momentum: Tensor, count: int) -> Iterable[tuple[list[Tensor], Tensor]]:
    """A group of matrices and their momentum [matrices, rows, columns], in up to `count` shares; momenta are views."""
    size = -(-len(group) // count)
    return [(group[start : start + size], momentum[start : start + size]) for start in range(0, len(group), size)]
