"""Counter-based random numbers: a draw is a pure function of its name, and no generator is advanced.

Philox4x32-10 (Salmon et al. 2011) enciphers a counter under a key. The key is the seed. The counter says which draw it
is: token id, position, sample index and purpose. So nothing that happens to a sequence on its way (other requests in
the batch, chunked prefill, a preemption, a rejected draft token, another device) changes what it draws.

    key      (seed & 0xffffffff, seed >> 32)
    counter  (token_id // 4, position, sample_index, purpose | branch << 2)
    h        word token_id % 4 of philox(counter, key)
    u        (h + 0.5) * 2^-32, in float64
    gumbel   -log(-log(u))
"""

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge.errors import ForgeError
from forge.model.model import Draw

if TYPE_CHECKING:
    from forge.backends.cpu.draw import CompiledDraw

_MASK = 0xFFFFFFFF
_CHUNK = 32768
"""Tokens at a time in a large vocabulary: their words stay in the second-level cache."""
MAX_BRANCHES = 64

Word = Any
"""An int, or a uint64 array of such."""


class Purpose(IntEnum):
    """What a draw decides. Two draws at one position must differ in purpose or branch.

    Only SAMPLE is used by default; the others serve the acceptance rule `rejection`.
    """

    SAMPLE = 0
    """The next token, of the target and of a draft alike."""
    PROPOSE = 1
    """A draft token, drawn independently of the target."""
    ACCEPT = 2
    """Whether a draft token is accepted."""
    RESAMPLE = 3
    """The token in place of a rejected draft token."""


class DrawName(NamedTuple):
    """Which draw it is."""

    seed: int
    """Below 2^64."""
    sample_index: int
    position: int
    """Of the token that the draw decides about."""
    purpose: Purpose = Purpose.SAMPLE
    branch: int = 0
    """Below `MAX_BRANCHES`."""

    @classmethod
    def of(cls, draw: Draw, purpose: Purpose = Purpose.SAMPLE, branch: int = 0) -> "DrawName":
        """Name a draw of the next token of a text."""
        return cls(draw.seed, draw.sample_index, draw.position, purpose, branch)

    def words(self, counter: Word) -> tuple[Word, Word, Word, Word]:
        """Return the words h of the token ids from `4 * counter` to `4 * counter + 3`."""
        key = self.seed & _MASK, self.seed >> 32
        return philox(counter, self.position, self.sample_index, self.purpose | self.branch << 2, *key)


def philox(x0: Word, x1: Word, x2: Word, x3: Word, k0: int, k1: int) -> tuple[Word, Word, Word, Word]:
    """Return Philox4x32-10 of the counter (x0, x1, x2, x3) under the key (k0, k1).

    All are 32-bit words: Python ints, or uint64 arrays, one counter per entry.
    """
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x2 = p1 >> 32, p0 >> 32
        x0 ^= x1  # arrays in place, a fifth faster
        x0 ^= k0
        x2 ^= x3
        x2 ^= k1
        p1 &= _MASK
        p0 &= _MASK
        x1, x3 = p1, p0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3


def uniform(name: DrawName) -> float:
    """Return a number strictly between 0 and 1."""
    return (int(name.words(0)[0]) + 0.5) * 2.0**-32


def token_words(token_ids: np.ndarray, name: DrawName) -> np.ndarray:
    """Return the word h of each token id (int64 `[n]`, ascending, n > 0): uint64 `[n]`."""
    low, high = int(token_ids[0]), int(token_ids[-1])
    dense = high - low < 4 * len(token_ids)  # else few of many: a counter of its own for each
    counters = np.arange(low // 4, high // 4 + 1) if dense else token_ids // 4
    words = np.stack(name.words(counters.astype(np.uint64)), axis=1)  # one row per counter
    if dense:
        words = words.reshape(-1)[low & 3 :][: high - low + 1]
        return words if len(words) == len(token_ids) else np.take(words, token_ids - low)
    return np.take_along_axis(words, token_ids[:, None] & 3, axis=1)[:, 0]


def gumbel(words: np.ndarray) -> np.ndarray:
    """Turn words h into standard Gumbel noise: float64 `[n]`."""
    noise = (words + 0.5) * 2.0**-32
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbel_argmax(token_ids: np.ndarray, scores: np.ndarray, name: DrawName) -> int:
    """Draw one of `token_ids` with probability softmax(scores): the token with the greatest score + Gumbel noise.

    token_ids: int64 `[n]`, ascending. scores: float64 `[n]`, not all of them -infinity. Of equal sums the lower id
    wins. Machine code draws the same token in a tenth of the time, where Numba is installed.
    """
    draw = _compiled_draw()
    counter = name.position, name.sample_index, name.purpose | name.branch << 2
    token = draw(token_ids, scores, name.seed, *counter) if draw is not None else None
    return token if token is not None else numpy_argmax(token_ids, scores, name)


@cache
def _compiled_draw() -> "CompiledDraw | None":
    try:
        from forge.backends.cpu.draw import CompiledDraw

        return CompiledDraw()
    except (ImportError, ForgeError):  # without Numba, or on a processor that it has no code for
        return None


def numpy_argmax(token_ids: np.ndarray, scores: np.ndarray, name: DrawName) -> int:
    """Draw as `gumbel_argmax` does, in NumPy. A vocabulary of 151,936 tokens takes a few milliseconds."""
    best, winner = -np.inf, -1
    for start in range(0, len(scores), _CHUNK):
        ids = token_ids[start : start + _CHUNK]
        sums = scores[start : start + _CHUNK] + gumbel(token_words(ids, name))
        index = int(sums.argmax())
        if sums[index] > best:
            best, winner = sums[index], int(ids[index])
    return winner
