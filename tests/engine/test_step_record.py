"""The record of a step: every field from what the step was, with a scheduler and without a model."""

from types import SimpleNamespace
from typing import Any

from forge.cache.factory import CacheSize, create_kv_cache
from forge.engine.policies import SchedulerConfig
from forge.engine.proposer import NO_DRAFTS, Proposal, StepDrafts
from forge.engine.sampler import LaunchedStep, StepResults
from forge.engine.scheduler import Scheduler
from forge.engine.step_plan import PlanItem, StepPlan
from forge.engine.step_record import RecordBuilder
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.trace.records import CacheRecord, ItemRecord
from tests.engine.schedules import outcomes_of, sequence

BYTES = 10
TIMES = 3.0, 5.25


def launched(plan: StepPlan, drafts: StepDrafts = NO_DRAFTS, has_batch: bool = True) -> LaunchedStep:
    rows = [SequenceRows(range(item.num_tokens), item.start, item.block_table, item.logit_rows) for item in plan.items]
    logits: Any = SimpleNamespace(execution="graph")
    return LaunchedStep(plan, drafts, flat_batch(rows, 4) if has_batch else None, logits, [], 1.5, 2.5, 250.0)


def ran(kv: str = "prefix", **more: Any) -> tuple[Scheduler, StepPlan, RecordBuilder]:
    """A prompt of 6 tokens and a prefill-only one of 3 that a scheduler has committed."""
    cache = create_kv_cache(kv, CacheSize(32, 4, 4, 8, 8))
    scheduler = Scheduler(cache, SchedulerConfig(4), range(cache.num_blocks, cache.num_blocks + 9))
    scheduler.prefill_only.temporary_bytes = lambda rows, logit_rows: 100 * rows + logit_rows
    scheduler.keep_block_map = True
    scheduler.add(sequence(0, tokens=6, **more))
    scheduler.add(sequence(1, tokens=3, max_tokens=1, prefill_only=True))
    plan = scheduler.schedule()
    scheduler.commit(plan, outcomes_of(scheduler, plan, ending=(1,)))
    return scheduler, plan, RecordBuilder(scheduler, BYTES)


def test_a_record_says_what_the_step_did_and_what_came_between():
    scheduler, plan, builder = ran()
    names: Any = {name: [name] for name in ("arrived", "rejected")}
    builder.arrived, builder.rejected, builder.discarded = names["arrived"], names["rejected"], 4
    results: Any = StepResults(tokens=["token"], finished=["finished"], cycles=("cycle",), undrafted=("undrafted",))
    record = builder.build(launched(plan), results, *TIMES)

    assert (record.step, record.tokens, record.finished) == (1, ("token",), ("finished",))
    assert (record.arrived, record.rejected, record.discarded) == (("arrived",), ("rejected",), 4)
    assert record.items == (ItemRecord(0, "prefill", 0, 6), ItemRecord(1, "prefill_only", 0, 3))
    assert record.cache == CacheRecord("prefix", 4, 8, 2, 6, 60, 80, prefix_queries=6)
    assert (record.schedule_ms, record.forward_ms, record.sample_ms) == (1.5, 2.5, 250.0)
    assert (record.started, record.ended, record.execution) == (3.0, 5.25, "graph")
    assert (record.execution_class, record.queues, record.planned_ahead) == ("mixed", scheduler.queues, False)
    assert (record.admitted, record.waiting, record.preempted) == (plan.admitted, (), ())
    assert (record.block_table_entries, record.temporary_bytes) == (2, 902)
    assert (record.cycles, record.undrafted, record.events) == (("cycle",), ("undrafted",), ())
    assert record.blocks is not None and record.blocks.written == (0, 1, 8)

    again = builder.build(launched(plan, has_batch=False), StepResults(), *TIMES)
    assert (again.step, again.arrived, again.rejected, again.discarded) == (2, (), (), 0)
    assert again.temporary_bytes == 0 and again.blocks == scheduler.block_map
    scheduler.block_map = None
    assert builder.build(launched(plan), StepResults(), *TIMES).blocks is None


def test_draft_rows_are_one_for_each_token_and_the_known_ones_again_in_each_further_draft():
    one = sequence(0)
    items = [PlanItem(i, one, 4, n, range(1), True, "decode", (0, 1, 2), 0, 3) for i, n in enumerate((1, 2, 1))]
    plan = StepPlan((*items[:2], items[2]._replace(num_draft_slots=0)), separate=(items[0]._replace(seq_id=3),))
    drafts = StepDrafts({0: (Proposal((1, 2)),), 1: (Proposal((1, 2, 3)), Proposal((4,)), Proposal((5,)))})
    drafts.proposals[2] = drafts.proposals[0]
    record = RecordBuilder(ran()[0], BYTES).build(launched(plan, drafts), StepResults(), *TIMES)
    assert [item.num_draft_tokens for item in record.items] == [2, 5 + 2 * 2, 0, 0] and record.discarded == 0


def test_padding_is_not_written():
    _, plan, builder = ran()
    step = launched(plan)
    assert step.batch is not None
    step.batch.slot_mapping[:] = [-1] * 8 + [3]
    record = builder.build(step, StepResults(), *TIMES)
    assert record.blocks is not None and record.blocks.written == (0,)
