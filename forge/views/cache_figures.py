"""What a run did with its cache, worked out from its records: how much it held, how much of that was empty, what it
found there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.engine.outputs import RequestOutput
from forge.trace.records import BlockEvicted, BlockSplit, StepRecord
from forge.views.formatting import count, share
from forge.views.json_output import as_object


@dataclass(frozen=True)
class CacheFigures:
    """The cache's figures of one run, for tables and JSON."""

    kind: str
    block_size: int
    num_blocks: int
    most_blocks: int
    """Used at once."""
    most_bytes_held: int
    most_bytes_reserved: int
    internal_fragmentation: float | None
    """The share of reserved slots with nothing in them, over all steps together; None where nothing was reserved."""
    most_blocks_saved: int
    """References beyond the first, at once: blocks that sharing saved."""
    copy_on_write: int
    evictions: int
    prompt_tokens: int
    tokens_cached: int
    """Of those, the ones that were in the cache when their request began."""

    @classmethod
    def of(cls, records: Sequence[StepRecord], outputs: Sequence[RequestOutput]) -> "CacheFigures":
        """Raises ValueError where no step ran."""
        caches = [record.cache for record in records]
        events = [event for record in records for event in record.events]
        reserved = sum(cache.slots_reserved for cache in caches)
        samples = [sample.metrics for output in outputs for sample in output.outputs[:1]]
        return cls(
            kind=caches[0].kind,
            block_size=caches[0].block_size,
            num_blocks=caches[0].num_blocks,
            most_blocks=max(cache.used_blocks for cache in caches),
            most_bytes_held=max(cache.bytes_held for cache in caches),
            most_bytes_reserved=max(cache.bytes_reserved for cache in caches),
            internal_fragmentation=1 - sum(cache.slots_filled for cache in caches) / reserved if reserved else None,
            most_blocks_saved=max(cache.blocks_saved for cache in caches),
            copy_on_write=sum(isinstance(event, BlockSplit) for event in events),
            evictions=sum(isinstance(event, BlockEvicted) for event in events),
            prompt_tokens=sum(metrics.num_prompt_tokens for metrics in samples),
            tokens_cached=sum(metrics.tokens_cached for metrics in samples),
        )

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that needed no computing."""
        return self.tokens_cached / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hits(self) -> str:
        """`96 of 140 (68.6 %)`."""
        return f"{count(self.tokens_cached)} of {count(self.prompt_tokens)} ({share(self.hit_rate)})"

    def as_object(self) -> dict[str, Any]:
        """For `--json`."""
        return as_object(self, "hit_rate", without=("kind",))
