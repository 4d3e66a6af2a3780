"""The map of the pool, the tables and the figures, drawn from maps made by hand."""

from dataclasses import replace

import pytest

from forge.trace.records import BlockMap, CacheRecord, TableRecord
from forge.views.block_map import (
    CACHED,
    FREE,
    OWNED,
    RESERVED,
    SHARED,
    WRITTEN,
    SequenceNames,
    cache_facts,
    cells,
    pool_lines,
    table_lines,
)


def table(owner, blocks, computed, is_snapshot=False):
    return TableRecord(owner, is_snapshot, tuple(blocks), computed, len(blocks) * 16)


def block_map(*tables, num_blocks=16, cached=(), written=()):
    counts = [0] * num_blocks
    for one in tables:
        for block in one.blocks:
            counts[block] += 1
    return BlockMap(16, tables, tuple(counts), tuple(cached), tuple(written))


EVERY_STATE = block_map(
    table(70, (0, 1, 2), 40), table(71, (0, 4), 17), table(72, (6, 7), 5), cached=(9,), written=(4,)
)
"""70 and 71 share block 0, 71 wrote into 4, 72 has nothing in 7 yet, and 9 is cached."""


def drawn(lines):
    return [line.plain for line in lines]


def test_every_block_shows_what_is_to_be_known_of_it():
    states = [cell.state for cell in cells(EVERY_STATE, SequenceNames())]
    assert states == [SHARED, OWNED, OWNED, FREE, WRITTEN, FREE, OWNED, RESERVED, FREE, CACHED, *[FREE] * 6]


def test_the_map_needs_no_colour():
    (row,) = drawn(pool_lines(EVERY_STATE, SequenceNames(), 80, 8))
    assert row == " 0  * 0 0 · ! · 2 - · ▒ · · · · · ·"


def test_sequences_are_numbered_as_they_are_met_whatever_their_ids():
    names = SequenceNames()
    assert [names.label(seq_id) for seq_id in (93, 17, 93)] == ["seq 0", "seq 1", "seq 0"]


def test_a_sequence_past_the_letters_begins_again_at_the_first():
    names = SequenceNames()
    for seq_id in range(40):
        names.number(seq_id)
    assert drawn(pool_lines(block_map(table(36, (0,), 3)), names, 80, 8))[0].split()[1] == "0"


def test_a_snapshot_has_a_sign_and_a_line_of_its_own():
    found = block_map(table(3, (0,), 16), table(0, (1,), 16, is_snapshot=True))
    assert " 0  0 s" in drawn(pool_lines(found, SequenceNames(), 80, 8))[0]
    assert any(line.startswith("snapshot 0") for line in drawn(table_lines(found, SequenceNames(), 80, 8)))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("num_blocks", [1, 8, 64, 65, 512, 1000, 5000])
def test_the_map_keeps_to_its_width_and_height(width, rows, num_blocks):
    lines = drawn(pool_lines(block_map(table(0, (0,), 3), num_blocks=num_blocks), SequenceNames(), width, rows))
    assert len(lines) <= rows + (num_blocks > 8 * rows)
    assert max(map(len, lines)) <= max(width, 66)


def test_a_map_with_room_shows_every_block():
    lines = drawn(pool_lines(block_map(num_blocks=1000), SequenceNames(), 80, 16))
    assert sum(line.count("·") for line in lines) == 1000


def test_a_condensed_map_loses_nothing_that_matters():
    found = block_map(table(0, (999,), 3), table(1, (400,), 16), num_blocks=1000, written=(999,))
    lines = drawn(pool_lines(found, SequenceNames(), 80, 4))
    assert lines[-1].startswith("each character is ")
    assert "!" in lines[-2] and any("1" in line[6:] for line in lines[:-1])


def test_free_rows_at_the_end_can_be_counted_instead():
    lines = drawn(pool_lines(block_map(table(0, (0,), 3), num_blocks=512), SequenceNames(), 80, 16, hide_free=True))
    assert len(lines) == 3 and lines[-1].strip() == "and 384 more free blocks"
    used_to_the_end = block_map(table(0, (511,), 3), num_blocks=512)
    assert len(pool_lines(used_to_the_end, SequenceNames(), 80, 16, hide_free=True)) == 8


def test_a_table_shows_positions_fill_references_and_writes():
    lines = drawn(table_lines(EVERY_STATE, SequenceNames(), 80, 8))
    assert lines[1].split()[:3] == ["seq", "0", "40"] and lines[1].endswith(" 8/16  0*2 1 2")
    assert lines[2].endswith(" 1/16  0*2 4!") and lines[3].endswith(" 5/16  6 7")
    assert lines[1].count("▉") == 8 and lines[1].count("░") == 8


def test_a_block_is_neither_full_nor_empty_in_the_picture_unless_it_is():
    for held, cells_filled in ((1, 1), (63, 15), (64, 16)):
        found = BlockMap(64, (TableRecord(0, False, (0,), held, 64),), (1,), ())
        assert drawn(table_lines(found, SequenceNames(), 80, 8))[1].count("▉") == cells_filled


def test_a_long_table_keeps_its_end():
    blocks = [(7 * place) % 1000 for place in range(200)]
    line = drawn(table_lines(block_map(table(0, blocks, 3200), num_blocks=1000), SequenceNames(), 80, 8))[1]
    assert len(line) <= 80 and " … " in line and line.endswith(f" {blocks[-1]}")


def test_neighbours_are_drawn_together_in_the_order_of_positions():
    line = drawn(table_lines(block_map(table(0, (4, 5, 6, 1, 2), 80)), SequenceNames(), 80, 8))[1]
    assert line.endswith("4–6 1 2")


def test_tables_without_a_line_are_counted():
    found = block_map(*(table(seq_id, (2 * seq_id, 2 * seq_id + 1), 20) for seq_id in range(10)), num_blocks=20)
    lines = drawn(table_lines(found, SequenceNames(), 80, 4))
    assert len(lines) == 5 and lines[-1] == "and 7 more sequences with 14 blocks"


def test_the_figures_are_those_that_a_kind_has():
    record = CacheRecord("prefix", 16, 64, 10, 150, 150_000, 160_000, 3, 2, 40, 32, 1, 5)
    facts = dict(cache_facts(record))
    assert facts["used"] == "10 of 64 (15.6 %)" and facts["cached"] == "3" and facts["free"] == "51"
    assert facts["internal fragmentation"] == "6.2 %" and facts["saved by sharing"] == "16.7 %"
    assert facts["prefix hits"] == "32 of 40 tokens" and facts["evicted"] == "5"
    assert facts["KV held"] == "150.0 kB of 160.0 kB reserved"
    assert "saved by sharing" not in dict(cache_facts(replace(record, kind="basic")))
    assert "prefix hits" not in dict(cache_facts(replace(record, kind="paged")))
