"""Random draws that depend on nothing but their name.

A draw is a pure function of (seed, sample index, position, purpose, branch). No generator is advanced, so nothing that
happens to a sequence on the way (other requests beside it, a preemption, a guess that was rejected) changes what it
draws.
"""

from enum import IntEnum
from hashlib import blake2b
from struct import Struct

_NAME = Struct("<QIIB")


class Purpose(IntEnum):
    """What a draw decides. Two draws at one position must have different purposes."""

    SAMPLE = 0
    """The next token."""
    PROPOSE = 1
    """A draft model's guess."""
    ACCEPT = 2
    """Whether the target keeps a guess."""
    RESAMPLE = 3
    """The token in place of a rejected guess."""


MAX_BRANCHES = 64


def uniform(seed: int, sample_index: int, position: int, purpose: Purpose, branch: int = 0) -> float:
    """A number in [0, 1) with 53 random bits: the digest of its own name.

    `seed` is below 2^64; `position` is where the drawn token will stand in its sequence; `branch`, below 64, tells
    apart the draws of several drafts that guess at one position.
    """
    digest = blake2b(_NAME.pack(seed, sample_index, position, branch << 2 | purpose), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
