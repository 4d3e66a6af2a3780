"""Attention at every edge, with an H200's multiprocessors: contexts, rows, groups, head sizes, holes in tables.

Each case runs the fused kernel of a decode, or `norm_rope_store` and `paged_attention`, against float64.
"""

import pytest

from forge.backends.cuda.inputs import Inputs
from forge.backends.cuda.shapes import Tuning
from tests.backends.cuda.models import TOLERANCE, relative_error
from tests.backends.cuda.test_attention import Setting
from tests.slow import mostly_slow

NO_BLOCK = 1 << 30
"""In a table where a sequence has no block: reading there is far outside any memory."""


def check(device: str, heads: int, kv_heads: int, head_dim: int, spans, tuning: Tuning = Tuning()) -> Inputs:
    setting = Setting(
        device, "float32", "float32", heads, kv_heads, head_dim, spans, 16, multiprocessors=132, tuning=tuning
    )
    want, before = setting.expected(), setting.qkv.clone()
    inputs = setting.inputs()
    stride = int(inputs.table_stride[0])
    for number, (_, end) in enumerate(spans):
        inputs.tables[number * stride + -(-end // 16) : (number + 1) * stride] = NO_BLOCK
    if inputs.shape.is_decode:
        got = setting.run.decode_attention(setting.qkv, setting.layer, setting.storage, 0, inputs)
        assert relative_error(got, want) < TOLERANCE["float32"], "fused"
        setting.qkv.copy_(before)
    setting.run.store_heads(setting.qkv, setting.layer, setting.storage, 0, inputs)
    got = setting.run.attention(setting.qkv, setting.storage, 0, inputs, logit_rows_only=False)
    assert relative_error(got, want) < TOLERANCE["float32"]
    assert not setting.run._counters.any()
    return inputs


@pytest.mark.parametrize("head_dim", mostly_slow([64, 128], quick=[64]))
@pytest.mark.parametrize("end", [1, 15, 16, 17])
def test_decodes_and_chunks_that_end_at_the_edges_of_blocks(end, head_dim, device):
    assert check(device, 2, 1, head_dim, [(end - 1, end)]).shape.is_decode
    check(device, 2, 1, head_dim, [(0, end), (max(0, end - 3), end)])


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [Tuning(), Tuning(new_key_last=True)], ids=["as it is", "new key last"])
def test_a_long_context_is_split_among_all_multiprocessors(tuning, device):
    assert check(device, 1, 1, 128, [(4099, 4100)], tuning).shape.splits == 32
    inputs = check(device, 2, 1, 64, [(149, 150), (64, 65), (0, 1)], tuning)
    assert inputs.shape.splits == 4, "three chunks, rounded up"


@pytest.mark.parametrize("group", mostly_slow(range(1, 9), quick=[1, 3, 8]))
def test_every_number_of_query_heads_to_a_key_value_head(group, device):
    check(device, group, 1, 64, [(16, 17), (0, 1)])
    check(device, 2 * group, 2, 64, [(15, 18), (0, 5)])


@pytest.mark.parametrize("rows", mostly_slow([1, 3, 17, 257], quick=[1, 17]))
def test_every_number_of_rows_as_a_decode_and_as_a_chunk(rows, device):
    assert check(device, 1, 1, 64, [(number % 5, number % 5 + 1) for number in range(rows)]).shape.is_decode
    check(device, 1, 1, 64, [(3, 3 + rows)])
