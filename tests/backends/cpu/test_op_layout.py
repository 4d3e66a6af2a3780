"""The layouts that kernels read and Python writes."""

import pytest

from forge.backends.cpu import kernel_table
from forge.backends.cpu.op_layout import (
    CONTEXT,
    HEADER,
    LINE_BYTES,
    OPERATION_BYTES,
    POOL,
    operation,
    structure,
)

LAYOUTS = {each.name: each.layout for each in vars(kernel_table).values() if hasattr(each, "layout")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_operation_begins_with_the_pools_cache_line_and_arguments_come_after_it(name):
    layout = LAYOUTS[name]
    assert layout.itemsize == OPERATION_BYTES
    assert [layout.fields[field] for field in HEADER.names] == [HEADER.fields[field] for field in HEADER.names]
    assert all(layout.fields[field][1] >= LINE_BYTES for field in layout.names if field not in HEADER.names)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), CONTEXT, POOL])
def test_python_writes_a_field_where_a_kernel_reads_it(layout):
    written = structure(layout)
    assert all(getattr(written, name).offset == layout.fields[name][1] for name in layout.names)


def test_what_threads_write_at_once_lies_in_lines_of_its_own():
    lines = {name: POOL.fields[name][1] // LINE_BYTES for name in ("generation", "closed", "done", "inside", "asleep")}
    assert len(set(lines.values())) == len(lines)


def test_arguments_that_need_more_room_are_noticed():
    with pytest.raises(AssertionError, match="more room"):
        operation(*(f"argument{number}" for number in range(OPERATION_BYTES // 8)))
