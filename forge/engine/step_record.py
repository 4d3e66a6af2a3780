"""From a step to its `StepRecord`: who computed what, the tokens, the reasons, the cache, the times.

Everything is copied out, so a record holds nothing of the engine. Arrivals and refusals happen between steps; the next
record names them.
"""

from dataclasses import replace

import numpy as np

from forge.engine.proposer import StepDrafts
from forge.engine.sampler import LaunchedStep, StepResults
from forge.engine.scheduler import Scheduler
from forge.engine.step_plan import StepPlan
from forge.model.forward_batch import ForwardBatch
from forge.trace.records import ArriveRecord, BlockMap, CacheRecord, ItemRecord, RejectRecord, StepRecord


class RecordBuilder:
    """Builds the record of each step, and keeps the arrivals and refusals since the last one."""

    def __init__(self, scheduler: Scheduler, bytes_per_token: int):
        """bytes_per_token: of keys and values, all layers."""
        self._scheduler, self._bytes_per_token = scheduler, bytes_per_token
        self._num_steps = 0
        self.arrived: list[ArriveRecord] = []
        self.rejected: list[RejectRecord] = []
        self.discarded = 0
        """Async scheduling: wasted rows that are not yet in a record."""

    def build(self, step: LaunchedStep, results: StepResults, started: float, ended: float) -> StepRecord:
        """Build the record of a committed step. started, ended: in seconds on the engine's clock; it ended when its
        tokens were known, before the commit."""
        self._num_steps += 1
        arrived, self.arrived = tuple(self.arrived), []
        rejected, self.rejected = tuple(self.rejected), []
        discarded, self.discarded = self.discarded, 0
        plan, batch, scheduler = step.plan, step.batch, self._scheduler
        cache, stats = scheduler.cache, scheduler.stats
        temporary_bytes = scheduler.prefill_only.temporary_bytes
        return StepRecord(
            step=self._num_steps,
            items=_item_records(plan, step.drafts),
            tokens=tuple(results.tokens),
            finished=tuple(results.finished),
            cache=CacheRecord(
                kind=cache.kind,
                block_size=cache.block_size,
                bytes_held=stats.tokens_held * self._bytes_per_token,
                bytes_reserved=stats.used_blocks * cache.block_size * self._bytes_per_token,
                **stats._asdict(),
            ),
            schedule_ms=step.schedule_ms,
            forward_ms=step.forward_ms,
            sample_ms=step.sample_ms,
            started=started,
            ended=ended,
            execution_class=plan.execution_class,
            queues=scheduler.queues,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            rejected=rejected,
            arrived=arrived,
            block_table_entries=sum([len(item.block_table) for item in plan.items if item.phase != "prefill_only"]),
            temporary_bytes=temporary_bytes(len(batch.token_ids), len(batch.logit_rows)) if batch else 0,
            events=cache.take_events(),
            blocks=scheduler.block_map and _with_written(scheduler.block_map, batch, cache.block_size),
            cycles=results.cycles,
            undrafted=results.undrafted,
            execution=getattr(step.logits, "execution", None),
            planned_ahead=plan.ahead,
            discarded=discarded,
        )


def _item_records(plan: StepPlan, drafts: StepDrafts) -> tuple[ItemRecord, ...]:
    """Return each item with the draft tokens that it verified."""
    records = []
    for item in (*plan.items, *plan.separate):
        num_draft_tokens = 0
        if item.num_draft_slots and (proposals := drafts.proposals.get(item.seq_id, ())):
            repeated = item.num_tokens * (len(proposals) - 1)  # each further draft computes the known tokens again
            num_draft_tokens = sum(map(len, proposals)) + repeated
        records.append(
            ItemRecord(item.seq_id, item.phase, item.start, item.num_tokens, item.remaining, num_draft_tokens)
        )
    return tuple(records)


def _with_written(block_map: BlockMap, batch: ForwardBatch | None, block_size: int) -> BlockMap:
    """Return the block map with the blocks that the step wrote."""
    if batch is None:
        return block_map
    written = np.unique(batch.slot_mapping // block_size)
    return replace(block_map, written=tuple(written[written >= 0].tolist()))
