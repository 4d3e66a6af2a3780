"""The batch of a step, row by row: known tokens, draft tokens, and the same again in each fork."""

from typing import Any

import numpy as np

from forge.engine.batch_builder import BatchBuilder
from forge.engine.proposer import Proposal
from forge.engine.step_plan import ForkSlots, PlanItem
from tests.engine.schedules import sequence


def item(seq_id: int, start: int, num_tokens: int, rows: range, table: tuple[int, ...], **more: Any) -> PlanItem:
    tokens = list(range(100 * seq_id, 100 * seq_id + 9))
    return PlanItem(seq_id, sequence(seq_id, token_ids=tokens), start, num_tokens, rows, True, "decode", table, **more)


def test_rows_of_all_items_lie_end_to_end_with_the_drafts_of_each():
    forks = ForkSlots(-1, (0, 5)), ForkSlots(-2, (0, 6)), ForkSlots(-3, (0, 7))
    items = [
        item(1, 2, 3, range(2, 3), (4, 9)),
        item(2, 4, 2, range(1, 5), (0, 1), num_draft_slots=3, forks=forks),
        item(3, 6, 1, range(4), (2, 3), num_draft_slots=3),
        item(4, 6, 1, range(1), (8, 10), follows=5),
    ]
    drafts = {2: (Proposal((7, 8)), Proposal((9,)), Proposal((6, 5, 4))), 4: (Proposal((1,)),)}
    batch = BatchBuilder(8).build(items, drafts)

    rows = [[102, 103, 104], [204, 205, 7, 8], [204, 205, 9], [204, 205, 6, 5, 4], [306], [-6]]
    starts, tables = [2, 4, 4, 4, 6, 6], [[4, 9], [0, 1], [0, 5], [0, 6], [2, 3], [8, 10]]
    assert batch.token_ids.tolist() == [token_id for part in rows for token_id in part]
    assert batch.positions.tolist() == [s + i for s, part in zip(starts, rows, strict=True) for i in range(len(part))]
    assert batch.block_tables.tolist() == tables
    assert batch.logit_rows.tolist() == [2, 4, 5, 6, 8, 9, 11, 12, 13, 14, 15, 16]


def test_a_table_is_made_into_an_array_once_and_again_where_it_is_another():
    builder, table, arrays = BatchBuilder(8), (4, 9), []
    for blocks in (table, table, (4, 8)):
        batch = builder.build([item(1, 2, 3, range(2, 3), blocks)], {})
        arrays.append(builder._tables[1][1])
        assert batch.block_tables.tolist() == [[*blocks]] and arrays[-1].dtype == np.int32
    assert arrays[0] is arrays[1] is not arrays[2]
    builder.forget(1)
    builder.forget(1)
    assert builder._tables == {}
