"""`--kv`: from a mode to a cache and the size of the storage that goes with it."""

from dataclasses import dataclass

from forge.cache.basic import BasicKvCache
from forge.cache.kv_cache import KvCache
from forge.cache.off import OffKvCache
from forge.errors import UsageError

KV_MODES = ("off", "basic")
ALIASES = {"on": "basic"}

DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV_BYTES = 2 << 30
"""What the basic cache may reserve for all sequences together when nobody says otherwise."""


@dataclass(frozen=True)
class CacheSize:
    """What a cache has to hold."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    bytes_per_token: int
    num_blocks: int | None = None
    """The pool's size in blocks; None chooses one."""


def canonical_mode(mode: str) -> str:
    """The cache kind that `mode` means. Raises `UsageError` listing the kinds there are."""
    kind = ALIASES.get(mode, mode)
    if kind not in KV_MODES:
        raise UsageError(f"unknown kv mode {mode!r}; supported: {', '.join(KV_MODES)} (on means basic)")
    return kind


def create_kv_cache(mode: str, size: CacheSize) -> tuple[KvCache, int]:
    """The cache, and how many blocks its storage must have, scratch range included.

    Raises `UsageError` for an unknown mode or a pool that cannot hold one sequence.
    """
    kind = canonical_mode(mode)
    blocks_per_sequence = -(-size.max_model_len // size.block_size)
    if kind == "off":
        scratch = blocks_per_sequence * size.max_num_seqs
        return OffKvCache(0, scratch, size.block_size), scratch
    cache = BasicKvCache(_num_runs(size, blocks_per_sequence), size.max_model_len, size.block_size)
    return cache, cache.num_blocks


def _num_runs(size: CacheSize, blocks_per_sequence: int) -> int:
    """How many whole sequences the basic cache has room for."""
    if size.num_blocks is None:
        bytes_per_run = blocks_per_sequence * size.block_size * size.bytes_per_token
        return max(1, min(size.max_num_seqs, DEFAULT_KV_BYTES // bytes_per_run))
    runs = size.num_blocks // blocks_per_sequence
    if runs == 0:
        raise UsageError(
            f"--num-blocks {size.num_blocks} cannot hold one sequence of {size.max_model_len} tokens, which takes "
            f"{blocks_per_sequence} blocks of {size.block_size}: raise it, or lower --max-model-len"
        )
    return min(runs, size.max_num_seqs)
