"""What a plan says of its items, and how it is put together: without a scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

from forge.cache.kv_storage import BlockCopy
from forge.engine.step_plan import Outcome, PlanBuilder, PlanItem, StepPlan
from forge.engine.task import GENERATE, Task


def item(seq_id: int, num_tokens: int = 1, phase: Any = "decode", num_rows: int = 1, **more: Any) -> PlanItem:
    sequence: Any = SimpleNamespace(task=more.pop("task", GENERATE))
    return PlanItem(seq_id, sequence, 0, num_tokens, range(num_rows), True, phase, (), **more)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (["decode", "decode"], "decode"),
        ([], "decode"),
        (["prefill"], "mixed"),
        (["decode", "prefill"], "mixed"),
        (["prefill_only", "prefill_only"], "prefill_only"),
        (["decode", "prefill_only"], "mixed"),
    ],
)
def test_a_step_is_of_one_kind_if_all_its_items_are(phases, expected):
    items = tuple(item(seq_id, phase=phase) for seq_id, phase in enumerate(phases))
    assert StepPlan(items).execution_class == StepPlan(items[1:], separate=items[:1]).execution_class == expected


def test_what_is_added_takes_from_the_budget_and_what_is_dropped_gives_back():
    plan = PlanBuilder(limit=20, budget=20)
    plan.add(item(0, 5, "prefill"))
    plan.add(item(1, 1))
    plan.add(item(2, 3, "prefill"))
    assert (plan.budget, plan.prefill_tokens, plan.needs_hidden) == (11, 8, False)
    plan.copies = [BlockCopy(1, 2), BlockCopy(3, 4)]
    plan.drop(0, (4, 5))
    assert (plan.budget, plan.prefill_tokens, list(plan.items)) == (16, 3, [1, 2])
    assert plan.copies == [BlockCopy(1, 2)]
    plan.drop(0)
    assert plan.budget == 16 and plan.copies == [BlockCopy(1, 2)]
    plan.add(item(3, 4, "prefill_only", task=Task(pooling="last")))
    plan.add(item(1, 1))
    assert plan.needs_hidden, "as long as an item does"


def test_embeddings_and_what_has_too_many_rows_take_forwards_of_their_own():
    plan = PlanBuilder(limit=99, budget=99)
    embedding, long, short = item(1, task=Task(pooling="last")), item(2, num_rows=4), item(3, num_rows=3)
    for generation in (item(0, num_rows=4), short):
        plan.add(generation)
    plan.prefill_only = [embedding, long, item(4)]
    plan.set_apart(max_logit_rows=3)
    built = plan.build()
    assert [item.seq_id for item in built.items] == [3, 4]
    assert [item.seq_id for item in built.separate] == [0, 1, 2]


def test_a_plan_has_what_was_put_into_it():
    names = ["separate", "copies", "swap_outs", "swap_ins", "admitted", "waiting", "preempted", "exhausted"]
    parts: Any = {name: [name] for name in names}
    built = PlanBuilder(9, 9, prefill_only=[item(1)], items={0: item(0)}, **parts).build()
    assert [item.seq_id for item in built.items] == [0, 1] and not built.ahead
    assert [getattr(built, name) for name in names] == [(name,) for name in names]


def test_an_outcome_and_an_item_are_plain_ones_if_nothing_else_is_said():
    assert Outcome(0, 0, (), None) == (0, 0, (), None, None, 0, None)
    assert item(0)[8:] == (0, 0, (), None, 0)
    assert PlanBuilder(9, 9).num_passing == 0
