"""From what a step did to the parts of its record. Everything is copied out: a record holds nothing of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from forge.cache.kv_cache import CacheStats
from forge.cache.kv_storage import KvLayout
from forge.engine.row_layout import Runs
from forge.engine.step_plan import PlanItem
from forge.model.forward_batch import ForwardBatch
from forge.trace.records import BlockMap, CacheRecord, ItemRecord

NO_RUNS: Mapping[int, Runs] = {}


def item_records(items: Sequence[PlanItem], runs: Mapping[int, Runs] = NO_RUNS) -> list[ItemRecord]:
    """`runs`: the guesses that were made, of each sequence that has any."""
    records = []
    for item in items:
        seq_id, num_tokens = item.seq_id, item.num_tokens
        num_guesses = 0
        if item.num_guesses and seq_id in runs:  # each further run computes the known tokens again
            num_guesses = sum([num_tokens + len(run) for run in runs[seq_id]]) - num_tokens
        records.append(ItemRecord(seq_id, item.phase, item.start, num_tokens, item.remaining, num_guesses))
    return records


def cache_record(kind: str, layout: KvLayout, stats: CacheStats) -> CacheRecord:
    num_blocks, used_blocks, tokens_held, *rest = stats
    bytes_held = tokens_held * layout.bytes_per_token
    bytes_reserved = used_blocks * layout.block_size * layout.bytes_per_token
    return CacheRecord(kind, layout.block_size, num_blocks, used_blocks, tokens_held, bytes_held, bytes_reserved, *rest)


def map_of_written(block_map: BlockMap | None, batch: ForwardBatch | None, block_size: int) -> BlockMap | None:
    """Where every block is, and which ones the step wrote, where somebody wants to know."""
    if block_map is None or batch is None:
        return block_map
    written = np.unique(batch.slot_mapping // block_size)
    return replace(block_map, written=tuple(written[written >= 0].tolist()))
