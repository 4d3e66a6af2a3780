"""Rotary position embedding: how far each pair of a head turns per position, and YaRN's stretching of it.

Pair i of a head (elements i and i + head_dim / 2) turns by `position * theta ** (-2 i / head_dim)` (Su et al. 2021). A
model trained on positions below 32,768 has never seen the angles that its slow pairs reach beyond. YaRN (Peng et al.
2023, https://arxiv.org/abs/2309.00071) slows them down: a pair that turns less than `beta_slow` times within the
original context is slowed by `factor`, one that turns more than `beta_fast` times stays as it is, and between the two
lies a ramp. Queries and keys are also scaled, which sharpens the attention over more keys. It is static: short contexts
are computed in the same way as long ones.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Yarn:
    """How a context is extended: `factor` times `original_max_position_embeddings`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def attention_factor(self) -> float:
        """The factor that queries and keys are scaled by."""
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    @property
    def max_position_embeddings(self) -> int:
        return int(self.factor * self.original_max_position_embeddings)

    def pair(self, turns: float, head_dim: int, theta: float) -> float:
        """Return the pair, as a fraction, that turns so many times within the original context."""
        return head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / 2 / math.log(theta)

    def slowed(self, frequencies: np.ndarray, head_dim: int, theta: float) -> np.ndarray:
        """Divide `frequencies`, float64 `[head_dim / 2]`, by `factor` as far as each pair is slow."""
        first = max(math.floor(self.pair(self.beta_fast, head_dim, theta)), 0)
        last = min(math.ceil(self.pair(self.beta_slow, head_dim, theta)), head_dim - 1)
        slowness = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0, 1)
        return frequencies / self.factor * slowness + frequencies * (1 - slowness)


@dataclass(frozen=True)
class Rope:
    """The rotation of a model's queries and keys."""

    head_dim: int
    theta: float
    yarn: Yarn | None = None
    attention_factor: float = 1.0
    """The factor that cos and sin are multiplied by, and so queries and keys."""

    def frequencies(self) -> np.ndarray:
        """Return the radians per position of each pair: float64 `[head_dim / 2]`."""
        half = self.head_dim // 2
        frequencies = self.theta ** (-np.arange(half) / half)
        return frequencies if self.yarn is None else self.yarn.slowed(frequencies, self.head_dim, self.theta)
