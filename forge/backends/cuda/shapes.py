"""Which tile a kernel is launched with, and how many rows a step is padded to: plain numbers from plain numbers, so
that a tuning changes one place.

The aim is the same everywhere: enough programs for every multiprocessor, and per program so many bytes asked for at
once that the memory is kept busy (an H200 has 132 multiprocessors and wants some 30 KB in flight on each).

Every constant says whether it is a *guess* (worked out; chapters/reference/gpu.md says what would settle it), or
*measured* and on what.
"""

from dataclasses import dataclass

from forge.backends.cuda.weights import DENSE

MATVEC_ROWS = 1
"""Up to this many rows are multiplied one by one. Measured on an H200, Qwen3-0.6B in BF16: a decode of
four rows takes 1.47 ms one by one, and 1.22 ms by cuBLAS."""
PACKED_TILE_ROWS = 64
"""Up to this many rows share one pass of the tile kernel over packed weights, of which cuBLAS would read a dense copy,
two to four times the bytes. Guess."""
CHUNK = 64
"""Keys that attention takes at a time, counted in absolute positions. Guess."""
MAX_SPLITS = 32
"""Programs that share one tile of attention at most. Guess."""
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a decode step that graphs are captured for. Guess."""
TOKEN_BUCKETS = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Rows of any other step (prefills, chunks, verifications, mixtures) that graphs are captured for. Guess."""
FINE_BUCKETS = (160, 192)
"""Further buckets of both kinds, with `Tuning.fine_buckets`. Guess."""
MULTIPROCESSORS = 132
"""Multiprocessors of an H200 (its data sheet), for which shapes are chosen unless a device says otherwise."""


@dataclass(frozen=True)
class Tuning:
    """Switches whose best setting depends on the GPU. The defaults are guesses, but for `tile_rows`."""

    tile_rows: int = 1
    """Up to this many rows share one pass of the tile kernel over dense weights; more go to cuBLAS. Measured on an
    H200, Qwen3-0.6B in BF16: a decode of 4 rows takes 1.22 ms with 1 and 1.70 ms with 16, one of 16 rows 1.22 and
    2.15 ms."""
    prefetch: bool = False
    """Whether `matmul` reads its first weights before it waits for the kernel before it, for up to 16 rows."""
    new_key_last: bool = False
    """Whether the last split of a decode takes the new key, having the fewest others; otherwise the first."""
    fine_buckets: bool = False
    """Whether graphs are captured for 160 and 192 rows too."""
    pause_gc: bool = False
    """Whether Python collects no garbage while a graph is captured."""


DEFAULT_TUNING = Tuning()
"""The settings unless a caller gives others. Guess."""


@dataclass(frozen=True)
class Tile:
    """A matrix product's tile, with the warps and stages of its program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionTile:
    """`rows` rows of a sequence, `block_m` rows of the matrix that they make with their heads."""

    rows: int
    block_m: int
    num_warps: int
    num_stages: int


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def matvec_tile(out_features: int, in_features: int, kind: int, multiprocessors: int = MULTIPROCESSORS) -> Tile:
    """Choose a tile of `matvec`: halve the rows per program until every multiprocessor has two programs."""
    block_n, max_block_k = (8, 1024) if kind == DENSE else (4, 2048)
    block_k = min(max_block_k, max(32, next_power_of_2(in_features)))
    while block_n > 2 and -(-out_features // block_n) < 2 * multiprocessors:
        block_n //= 2
    return Tile(1, block_n, block_k, num_warps=4, num_stages=1)


def matmul_tile(
    batch_rows: int,
    out_features: int,
    in_features: int,
    kind: int,
    multiprocessors: int = MULTIPROCESSORS,
    in_float32: bool = False,
) -> Tile:
    """Choose a tile of `matmul` for that many rows of the batch. in_float32: activations are float32, for exactness."""
    if in_float32:
        return Tile(16, 32, min(64, max(32, next_power_of_2(in_features))), num_warps=4, num_stages=3)
    block_m = min(64, max(16, next_power_of_2(batch_rows)))
    max_block_k = 128 if kind == DENSE or block_m == 16 else 64  # packed weights take registers on their way
    block_k = min(max_block_k, max(32, next_power_of_2(in_features)))
    block_n = 64
    while block_n > 16 and -(-out_features // block_n) < multiprocessors:
        block_n //= 2
    return Tile(block_m, block_n, block_k, num_warps=4, num_stages=4 if kind == DENSE else 3)


INVARIANT_TILE = Tile(16, 32, 64, num_warps=4, num_stages=4)
"""The one tile of `--invariant`, for every matrix and every number of rows. Guess."""


_FLOAT32_RUN = 8, 2
"""Warps and stages of attention in float32. Guess; fewer warps spill registers, by the compiler's listing."""


@dataclass(frozen=True)
class Policy:
    """What a step's shape depends on besides the batch."""

    heads: int
    kv_heads: int
    multiprocessors: int
    invariant: bool
    buckets: bool
    """Whether to pad to the shapes that graphs are captured for."""
    tuning: Tuning = DEFAULT_TUNING

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return self._with_fine(ROW_BUCKETS)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return self._with_fine(TOKEN_BUCKETS)

    def _with_fine(self, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({*buckets, *FINE_BUCKETS})) if self.tuning.fine_buckets else buckets

    @property
    def group(self) -> int:
        """The number of query heads per key/value head, rounded up to a power of two."""
        return next_power_of_2(self.heads // self.kv_heads)

    def attention_tile(self, num_rows: int, in_float32: bool) -> AttentionTile:
        """Choose a tile of `paged_attention` for a step that is not a decode: large if that still makes enough
        programs.

        Half as many as there are multiprocessors will do, since splits can double them. in_float32: it multiplies in
        float32, for exactness, which takes twice the memory and three times the registers.
        """
        group, multiprocessors = self.group, self.multiprocessors
        large = ((128, multiprocessors), (64, multiprocessors // 2), (32, multiprocessors // 2))
        for block_m, least in () if self.invariant or in_float32 else large:
            rows = max(1, block_m // group)
            if -(-num_rows // rows) * self.kv_heads >= least:
                return AttentionTile(rows, max(block_m, group), 8 if block_m == 128 else 4, 3 if block_m < 128 else 2)
        return self._small_tile(max(1, 16 // group), in_float32)

    def one_row_tile(self, in_float32: bool) -> AttentionTile:
        """Choose the tile of rows that are the only one of their sequence: decodes, and the last layer's logit rows.
        With `--invariant` it is that of any other step."""
        return self._small_tile(max(1, 16 // self.group) if self.invariant else 1, in_float32)

    def _small_tile(self, rows: int, in_float32: bool) -> AttentionTile:
        return AttentionTile(rows, max(16, self.group), *_FLOAT32_RUN if in_float32 else (4, 3))

    def splits(self, tiles: int, longest: int) -> int:
        """Choose how many programs share a tile's keys: enough to fill the multiprocessors, one per chunk or a few
        more, a power of two. Rounded up; rounded down, a decode of one row took 0.85 ms on an H200 instead of 0.82."""
        chunks = 1 if self.invariant else -(-longest // CHUNK)
        room = max(1, 2 * self.multiprocessors // max(1, tiles * self.kv_heads))
        return next_power_of_2(max(1, min(chunks, room, MAX_SPLITS)))


def splits_at_once(splits: int, num_valid: int, width: int) -> int:
    """Return how many splits' results are merged together: as many as fit into 64 registers of 128 threads."""
    return max(1, min(splits, 8192 // (num_valid * width)))
