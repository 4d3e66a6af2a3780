"""Tiles are powers of two that cover what they are for, whatever the model's sizes."""

import ast
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from forge.backends.cuda import inputs, shapes
from forge.backends.cuda.shapes import Policy
from forge.backends.cuda.weights import DENSE, Q4, Q4_K, Q8


def is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize("seed", range(30))
def test_product_tiles_suit_every_size(seed):
    rng = np.random.default_rng(seed)
    rows, columns, batch = (int(2 ** rng.uniform(0, high)) for high in (17, 14, 7))
    for kind in (DENSE, Q8, Q4, Q4_K):
        one, some = shapes.matvec_tile(rows, columns, kind), shapes.matmul_tile(batch, rows, columns, kind)
        for tile in (one, some):
            assert all(map(is_power_of_2, (tile.block_m, tile.block_n, tile.block_k, tile.num_warps)))
            assert tile.block_k % 32 == 0 and tile.block_n % 2 == 0, "whole groups, whole pairs of gate and up"
        assert some.block_m >= min(batch, 64) and some.block_n >= 16 and some.block_m >= 16


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (3, 3), (40, 8), (64, 4), (7, 1)])
@pytest.mark.parametrize("num_rows", [1, 5, 128, 600, 5000])
def test_attention_tiles_hold_their_rows_with_all_heads_of_a_group(heads, kv_heads, num_rows):
    for invariant, in_float32 in product((False, True), repeat=2):
        policy = Policy(heads, kv_heads, shapes.MULTIPROCESSORS, invariant, buckets=False)
        for tile in (policy.attention_tile(num_rows, in_float32), policy.one_row_tile(in_float32)):
            assert tile.block_m >= max(16, tile.rows * policy.group) and is_power_of_2(tile.rows)
            assert is_power_of_2(tile.block_m)


def test_there_are_hardly_more_splits_than_chunks_and_they_fill_the_device():
    policy = Policy(16, 8, shapes.MULTIPROCESSORS, invariant=False, buckets=False)
    assert policy.splits(1, 64) == 1
    assert policy.splits(1, 160) == 4
    assert policy.splits(1, 2048) == 32
    assert policy.splits(64, 2048) == 1
    assert replace(policy, invariant=True).splits(1, 2048) == 1
    for tiles in range(1, 70):
        for longest in (1, 63, 65, 1000, 40_000):
            chosen = policy.splits(tiles, longest)
            assert is_power_of_2(chosen) and chosen < 2 * -(-longest // shapes.CHUNK) and chosen <= 32
            assert is_power_of_2(shapes.splits_at_once(chosen, 2, 128))
            assert chosen % shapes.splits_at_once(chosen, 2, 128) == 0


def test_every_constant_says_whether_it_is_a_guess_or_where_it_was_measured():
    for module in (shapes, inputs):
        body = ast.parse(Path(module.__file__).read_text()).body
        for statement, following in pairwise(body):
            if not isinstance(statement, ast.Assign):
                continue
            name = ast.unparse(statement.targets[0])
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), name
            said = following.value.value
            assert re.search("Guess|[Mm]easured on|data sheet", said), f"{name}: {said}"
