"""`--kv`: from a mode to a cache and the size of the storage that goes with it."""

from collections.abc import Callable
from dataclasses import dataclass

from forge.cache.basic import BasicKvCache
from forge.cache.block_pool import blocks_for
from forge.cache.eviction import EvictionPolicy, eviction_policy
from forge.cache.kv_cache import KvCache
from forge.cache.off import OffKvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.errors import UsageError

KV_MODES = ("off", "basic", "paged", "prefix")
ALIASES = {"on": "basic"}

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_BLOCKS = 512
"""The default pool of `paged` and `prefix`, unless one sequence may take more."""
MAX_BLOCKS = 1 << 22
"""Of a pool: enough for 67 million tokens in blocks of 16. Each is an entry of several tables."""
DEFAULT_KV_BYTES = 2 << 30
"""What the basic cache reserves for all sequences together by default, at most."""


@dataclass(frozen=True)
class CacheSize:
    """The sizes that a cache is made for."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    bytes_per_token: int
    num_blocks: int | None = None
    """The pool's size in blocks; None chooses one."""
    kv_bytes: int | None = None
    """The pool's size in bytes, as whole blocks go; None leaves it to `num_blocks`."""

    @property
    def blocks_per_sequence(self) -> int:
        """The number of blocks that the longest sequence takes."""
        return blocks_for(self.max_model_len, self.block_size)


CacheFactory = Callable[[CacheSize], KvCache]
"""Makes a custom cache, whose `num_blocks` is the size of its storage."""


def canonical_mode(mode: str) -> str:
    """Return the cache kind that `mode` means. Raises `UsageError` listing the kinds there are."""
    kind = ALIASES.get(mode, mode)
    if kind not in KV_MODES:
        raise UsageError(f"unknown kv mode {mode!r}; supported: {', '.join(KV_MODES)} (on means basic)")
    return kind


def create_kv_cache(mode: str | CacheFactory, size: CacheSize, evict: str | EvictionPolicy = "lru") -> KvCache:
    """Create a cache. Its storage must have `num_blocks` blocks.

    mode: one of `KV_MODES`, or a function that makes a cache of this size. evict: of `prefix`, one of
    `EVICTION_POLICIES`, or such a function.

    Raises `UsageError` for an unknown mode and a pool of no block; and where `basic` could not hold one sequence. A
    pool of `paged` or `prefix` may be smaller than the longest sequence.
    """
    if callable(mode):
        return mode(size)
    kind = canonical_mode(mode)
    if kind == "off":
        return OffKvCache(size.blocks_per_sequence * size.max_num_seqs, size.block_size)
    if kind == "basic":
        return BasicKvCache(_num_runs(size), size.max_model_len, size.block_size)
    num_blocks = _num_blocks(size, max(DEFAULT_NUM_BLOCKS, size.blocks_per_sequence))
    if num_blocks > MAX_BLOCKS:
        pool = f"{_asked(size, num_blocks)} is a pool of {num_blocks:,} blocks"
        raise UsageError(f"{pool}, and {MAX_BLOCKS:,} is the most: lower it")
    if kind == "paged":
        return PagedKvCache(num_blocks, size.block_size)
    return PrefixKvCache(num_blocks, size.block_size, evict=eviction_policy(evict))


def _num_blocks(size: CacheSize, default: int) -> int:
    """Return the pool's size in blocks: the requested one, or `default`."""
    if size.kv_bytes is None:
        return default if size.num_blocks is None else size.num_blocks
    block_bytes = size.block_size * size.bytes_per_token
    if size.kv_bytes < block_bytes:
        raise UsageError(
            f"--kv-memory {size.kv_bytes} cannot hold one block of {size.block_size} tokens, which takes "
            f"{block_bytes} bytes: raise it, or lower --block-size"
        )
    return size.kv_bytes // block_bytes


def _num_runs(size: CacheSize) -> int:
    """Return how many whole sequences the basic cache has room for: by default as many as go into `DEFAULT_KV_BYTES`,
    and at least one."""
    per_sequence = size.blocks_per_sequence
    default = DEFAULT_KV_BYTES // (size.block_size * size.bytes_per_token)
    num_blocks = _num_blocks(size, max(default, per_sequence))
    if num_blocks < per_sequence:
        raise UsageError(
            f"{_asked(size, num_blocks)} cannot hold one sequence of {size.max_model_len} tokens, which takes "
            f"{per_sequence} blocks of {size.block_size}: raise it, or lower --max-model-len"
        )
    return min(num_blocks // per_sequence, size.max_num_seqs)


def _asked(size: CacheSize, num_blocks: int) -> str:
    """Return the option that a pool of `num_blocks` blocks follows from, with its value."""
    return f"--num-blocks {num_blocks}" if size.kv_bytes is None else f"--kv-memory {size.kv_bytes}"
