"""The table of rotations: cos and sin of every position and frequency, for rotary position embedding."""

import torch

from forge.model.rope import Rope

LEAST_POSITIONS = 4096
"""What the table covers at first; doubled as longer contexts come."""


class Rotations:
    """float32 `[positions, head_dim / 2]`, computed in float64, so that position 40,000 keeps its fraction.

    Tables, not arithmetic in the kernel: an angle of 40,000 in float32 is off by a few thousandths.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.cos = self.sin = torch.zeros(0, 0)

    def reach(self, length: int, rope: Rope) -> bool:
        """Make the table cover positions below `length`. Returns whether it moved in memory."""
        if length <= len(self.cos):
            return False
        positions = max(LEAST_POSITIONS, len(self.cos))
        while positions < length:
            positions *= 2
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.from_numpy(rope.frequencies())
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.cos, self.sin = cos.float().to(self._device), sin.float().to(self._device)
        return True
