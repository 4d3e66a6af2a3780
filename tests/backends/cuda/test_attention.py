"""Attention kernels against float64, over scattered blocks in a poisoned cache."""

import numpy as np
import pytest
import torch

from forge.backends.cuda.inputs import InputBuffer, shape_of
from forge.backends.cuda.network import Layer, Network
from forge.backends.cuda.shapes import Policy
from forge.backends.cuda.storage import TorchKvStorage
from forge.backends.fusion import Norm
from forge.cache.kv_storage import KvLayout
from forge.model.manual_batch import Part, flat_batch
from forge.model.rope import Rope
from tests.backends.cuda.models import DTYPES, TOLERANCE, launches, relative_error

EPS, THETA = 1e-6, 1e4
NOT_WRITTEN = 6e4


class Setting:
    """One layer's heads, a cache whose blocks lie anywhere, and a batch of parts of sequences."""

    def __init__(self, device, dtype, kv_dtype, heads, kv_heads, head_dim, spans, block_size=4, **options):
        """spans: (start, end) of each sequence's rows; what lies before start is already in the cache."""
        rng = self.rng = np.random.default_rng()
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.spans, self.block_size, self.device = spans, block_size, device
        gains = (torch.from_numpy(1 + 0.2 * rng.standard_normal(head_dim, dtype=np.float32)) for _ in range(2))
        self.query_norm, self.key_norm = (Norm(None, gain.to(device), EPS) for gain in gains)
        network = Network(None, (), None, heads, kv_heads, head_dim, Rope(head_dim, THETA))
        self.layer = Layer(None, (), self.query_norm, self.key_norm, None, None, None, None)
        self._sizes = device, dtype, network
        self.run = self.with_launches(**options)
        blocks = [-(-end // block_size) for _, end in spans]
        numbers = iter(rng.permutation(sum(blocks) + 3).tolist())
        self.tables = [[next(numbers) for _ in range(count)] for count in blocks]
        self.storage = TorchKvStorage(KvLayout(1, sum(blocks) + 3, block_size, kv_heads, head_dim, kv_dtype), device)
        self.past = [rng.standard_normal((2, start, kv_heads, head_dim), dtype=np.float32) for start, _ in spans]
        self._fill_cache()
        rows = sum(end - start for start, end in spans)
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.from_numpy(rng.standard_normal((rows, width), dtype=np.float32)).to(device).to(DTYPES[dtype])

    def with_launches(self, **options):
        return launches(*self._sizes, heads=self.heads, kv_heads=self.kv_heads, **options)

    def inputs(self, logit_rows=None):
        tokens = list(range(max(end for _, end in self.spans)))
        parts = [Part(tokens, *span, table) for span, table in zip(self.spans, self.tables, strict=True)]
        batch = flat_batch(parts, self.block_size, logit_rows)
        shape = shape_of(batch, self.run.policy, self.block_size, self.run.attends_in_float32(self.storage))
        buffer = InputBuffer(torch.device(self.device))
        buffer.reach(shape, batch.block_tables.size)
        buffer.fill(shape, batch)
        self.run._rotations.reach(int(batch.context_lens.max()), Rope(self.head_dim, THETA))
        self.run.reserve(shape)
        return buffer.inputs(shape)

    def expected(self) -> torch.Tensor:
        """float64, from the definition."""
        rows = iter(self.qkv.double().cpu())
        outs = []
        for (start, end), past in zip(self.spans, torch.from_numpy(np.concatenate([*self._rounded()])), strict=True):
            keys, values = (list(part[:start]) for part in past)
            for position in range(start, end):
                row = next(rows).view(-1, self.head_dim)
                query = self._turned(row[: self.heads], self.query_norm, position)
                key = self._turned(row[self.heads : self.heads + self.kv_heads], self.key_norm, position)
                keys.append(self._stored(key))
                values.append(self._stored(row[self.heads + self.kv_heads :]))
                group = self.heads // self.kv_heads
                every_key, every_value = (
                    torch.stack(x).repeat_interleave(group, dim=1) for x in (keys, values)
                )  # [n, heads, head_dim]
                scores = torch.einsum("hd,khd->hk", query, every_key) * self.head_dim**-0.5
                outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), every_value).reshape(-1))
        return torch.stack(outs)

    def _rounded(self):
        longest = max(past.shape[1] for past in self.past)
        for past in self.past:
            padded = np.zeros((1, 2, longest, self.kv_heads, self.head_dim))
            padded[0, :, : past.shape[1]] = self._stored(torch.from_numpy(past).double()).numpy()
            yield padded

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.storage.keys.dtype).double()

    def _turned(self, heads: torch.Tensor, norm: Norm, position: int) -> torch.Tensor:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double().cpu()
        half = self.head_dim // 2
        angles = position * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _fill_cache(self) -> None:
        for array in (self.storage.keys, self.storage.values):
            array.fill_(NOT_WRITTEN)
        for table, past in zip(self.tables, self.past, strict=True):
            for position in range(past.shape[1]):
                block, offset = table[position // self.block_size], position % self.block_size
                for array, values in zip((self.storage.keys, self.storage.values), past, strict=True):
                    array[0, block, offset] = torch.from_numpy(values[position]).to(array.dtype)


SHAPES = [
    pytest.param(("float32", "float32", 4, 2, 32), id="float32"),
    pytest.param(("float32", "float32", 3, 3, 6), id="odd sizes"),
    pytest.param(("bfloat16", "bfloat16", 6, 2, 16), id="bfloat16, groups of 3"),
    pytest.param(("bfloat16", "float16", 4, 1, 20), id="float16 cache"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_norms_turns_stores_and_attends_in_one_kernel(shape, device):
    setting = Setting(device, *shape, spans=[(0, 1), (9, 10), (129, 130)])

    inputs = setting.inputs()
    got = setting.run.decode_attention(setting.qkv, setting.layer, setting.storage, 0, inputs)

    assert inputs.shape.is_decode
    assert relative_error(got, setting.expected()) < TOLERANCE[shape[0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_several_sequences_attend_to_their_own_past(shape, device):
    setting = Setting(device, *shape, spans=[(0, 9), (66, 71), (3, 4)])
    want = setting.expected()

    inputs = setting.inputs()
    setting.run.store_heads(setting.qkv, setting.layer, setting.storage, 0, inputs)
    got = setting.run.attention(setting.qkv, setting.storage, 0, inputs, logit_rows_only=False)

    assert relative_error(got, want) < TOLERANCE[shape[0]]


@pytest.mark.parametrize("splits", [2, 8])
def test_splitting_the_keys_changes_nothing_but_the_last_bits(splits, device, monkeypatch):
    """Eight splits of three chunks: some have no keys at all."""
    setting = Setting(device, "float32", "float32", 4, 2, 16, spans=[(0, 1), (150, 151)], block_size=16)
    want = setting.expected()
    monkeypatch.setattr(Policy, "splits", lambda *_: splits)
    inputs = setting.inputs()

    fused = setting.run.decode_attention(setting.qkv.clone(), setting.layer, setting.storage, 0, inputs)
    setting.run.store_heads(setting.qkv, setting.layer, setting.storage, 0, inputs)
    apart = setting.run.attention(setting.qkv, setting.storage, 0, inputs, logit_rows_only=False)

    assert inputs.shape.splits == splits
    assert relative_error(fused, want) < TOLERANCE["float32"] and relative_error(apart, want) < TOLERANCE["float32"]
    assert not setting.run._counters.any(), "the next step finds its counters at zero"


def test_the_last_layer_attends_for_the_logit_rows_alone(device):
    setting = Setting(device, "float32", "float32", 4, 2, 16, spans=[(0, 12), (5, 9)])
    want = setting.expected()[[11, 15]]

    inputs = setting.inputs(logit_rows=[11, 15])
    setting.run.store_heads(setting.qkv, setting.layer, setting.storage, 0, inputs)
    got = setting.run.attention(setting.qkv, setting.storage, 0, inputs, logit_rows_only=True)

    assert inputs.shape.prunes
    assert relative_error(got, want) < TOLERANCE["float32"]


def test_a_row_with_slot_minus_one_writes_nothing_and_still_sees_its_own_key(device):
    setting = Setting(device, "float32", "float32", 2, 1, 8, spans=[(0, 1), (2, 3)])
    want = setting.expected()
    inputs = setting.inputs()
    inputs.slots[:] = -1
    before = setting.storage.keys.clone(), setting.storage.values.clone()

    got = setting.run.decode_attention(setting.qkv, setting.layer, setting.storage, 0, inputs)
    setting.run.store_heads(setting.qkv, setting.layer, setting.storage, 0, inputs)

    assert relative_error(got, want) < TOLERANCE["float32"]
    assert torch.equal(setting.storage.keys, before[0]) and torch.equal(setting.storage.values, before[1])


@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim"), [(1, 5, 1, 80), (64, 2, 2, 64), (256, 8, 1, 24)]
)
def test_contexts_that_end_at_the_edges_of_chunks_and_blocks(block_size, heads, kv_heads, head_dim, device):
    sizes = device, "float32", "float32", heads, kv_heads, head_dim
    alone = Setting(*sizes, spans=[(63, 64), (64, 65), (127, 128)], block_size=block_size)
    several = Setting(*sizes, spans=[(62, 66), (0, 65)], block_size=block_size)
    inputs, more = alone.inputs(), several.inputs()
    want = several.expected()

    got = alone.run.decode_attention(alone.qkv, alone.layer, alone.storage, 0, inputs)
    several.run.store_heads(several.qkv, several.layer, several.storage, 0, more)

    assert relative_error(got, alone.expected()) < TOLERANCE["float32"]
    together = several.run.attention(several.qkv, several.storage, 0, more, logit_rows_only=False)
    assert relative_error(together, want) < TOLERANCE["float32"]
