"""The model without weights: what it says hangs on its context alone, and on all of it as the cache has it."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forge import LLM, SamplingParams
from forge.errors import UsageError
from forge.model.catalog import resolve_model
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.hash_model import EOS_PROBABILITY, SAID, HashModel, create_hash_model
from forge.tokenizer.byte_tokenizer import EOS_TOKEN_ID

RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, 256, 41).tolist()


def printed_by(code: str) -> str:
    """What a process of its own prints."""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return found.stdout.strip()


class Laid:
    """A storage with one sequence in it, whose blocks lie in any order."""

    def __init__(self, model: HashModel, block_size: int, token_ids: list[int] = TEXT, tail: int = 1):
        """All but the last `tail` tokens are computed."""
        self.model, self.block_size, self.token_ids = model, block_size, token_ids
        num_blocks = -(-len(token_ids) // block_size)
        self.table = RNG.permutation(2 * num_blocks)[:num_blocks].tolist()
        self.storage = model.new_storage(model.kv_layout(2 * num_blocks, block_size))
        self.start = len(token_ids) - tail
        if self.start:
            self.forward(0, self.start)

    def forward(self, start: int, end: int, table: list[int] | None = None) -> np.ndarray:
        """Logits of every row."""
        rows = SequenceRows(self.token_ids[start:end], start, table or self.table, range(end - start))
        return self.model.forward(flat_batch([rows], self.block_size), self.storage)

    def last(self, table: list[int] | None = None) -> np.ndarray:
        return self.forward(self.start, len(self.token_ids), table)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The logits after each token of `TEXT`."""
    return Laid(HashModel(), 4, tail=len(TEXT)).last()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("tail", [1, 2, 17, 40])
def test_logits_have_the_same_bits_in_any_block_size_and_chunk(expected, block_size, tail):
    assert np.array_equal(Laid(HashModel(), block_size, tail=tail).last(), expected[-tail:])


def test_logits_have_the_same_bits_in_any_batch(expected):
    model = HashModel()
    storage = model.new_storage(model.kv_layout(40, 4))
    ends = [5, 41, 1, 30]
    tables = np.arange(40).reshape(4, 10).tolist()
    tables[1] = [*tables[1], *tables[0]][:11]  # the longest borrows a block that the shortest leaves free
    tables[0] = tables[0][1:]
    parts = [SequenceRows(TEXT[:end], 0, table, range(end - 1, end)) for end, table in zip(ends, tables, strict=True)]

    assert np.array_equal(model.forward(flat_batch(parts, 4), storage), expected[[end - 1 for end in ends]])


def test_logits_have_the_same_bits_in_every_process(expected):
    code = (
        "import hashlib\n"
        "from tests.model.test_hash_model import *\n"
        "logits = Laid(HashModel(), 4, tail=len(TEXT)).last()\n"
        "print(hashlib.sha256(logits.tobytes()).hexdigest())"
    )

    assert printed_by(code) == hashlib.sha256(expected.tobytes()).hexdigest()


def test_every_token_of_the_context_counts():
    for changed in range(len(TEXT) - 1):
        other = list(TEXT)
        other[changed] ^= 1
        assert not np.array_equal(Laid(HashModel(), 4).last(), Laid(HashModel(), 4, other).last())


@pytest.mark.parametrize("array", ["keys", "values"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_slot_of_the_context_is_read(array, block_size):
    laid = Laid(HashModel(), block_size)
    before = laid.last().copy()
    for position in range(laid.start):
        block, slot = laid.table[position // block_size], position % block_size
        words = getattr(laid.storage, array)[0, block, slot].view(np.uint32)
        words ^= 1
        assert not np.array_equal(laid.last(), before), f"position {position}"
        words ^= 1
    assert np.array_equal(laid.last(), before)


def test_a_wrong_block_shows_wherever_it_stands_in_the_table():
    laid = Laid(HashModel(), 4)
    before = laid.last().copy()
    unused = next(block for block in range(laid.storage.layout.num_blocks) if block not in laid.table)
    for place in range(len(laid.table) - 1):
        for block in (unused, laid.table[place - 1]):
            table = [*laid.table[:place], block, *laid.table[place + 1 :]]
            assert not np.array_equal(laid.last(table), before), f"block {place} of the table"


def test_a_block_with_the_right_tokens_behind_other_ones_shows():
    model, text = HashModel(), [1, 2, 3, 4] + [7, 7, 7, 7] * 2 + [5]
    laid = Laid(model, 4, text)
    before = laid.last().copy()
    first, second, third, last = laid.table

    assert not np.array_equal(laid.last([first, third, second, last]), before)


def test_nothing_is_written_where_a_row_has_no_slot(expected):
    laid = Laid(HashModel(), 4)
    rows = flat_batch([SequenceRows(TEXT[-1:], 40, laid.table, range(1))], 4)
    rows.slot_mapping[:] = -1
    before = laid.storage.keys.copy()
    laid.model.forward(rows, laid.storage)

    assert np.array_equal(laid.storage.keys, before)


def logits_of_many(**options) -> np.ndarray:
    """Those after each of 20,000 contexts of one text."""
    text = np.random.default_rng(5).integers(0, 256, 20_000).tolist()
    return Laid(HashModel(**options), 64, text, tail=len(text)).last()


def test_it_says_what_it_may_and_ends_as_often_as_it_should():
    chosen = logits_of_many().argmax(axis=1)
    ends = chosen == EOS_TOKEN_ID

    assert abs(ends.mean() - EOS_PROBABILITY) < 0.005
    assert set(chosen[~ends].tolist()) == set(SAID)
    shares = np.bincount(chosen[~ends])[list(SAID)] / (~ends).sum()
    assert abs(shares - 1 / len(SAID)).max() < 0.01
    assert not (logits_of_many(eos_probability=0).argmax(axis=1) == EOS_TOKEN_ID).any()


def test_a_draft_agrees_as_often_as_it_should():
    target = logits_of_many().argmax(axis=1)
    for agreement in (0.0, 0.3, 0.9, 1.0):
        draft = logits_of_many(agreement=agreement).argmax(axis=1)
        assert abs((draft == target).mean() - agreement) < 0.012


def test_a_small_vocabulary_is_enough():
    logits = logits_of_many(vocab_size=5, emitted=range(1, 5), eos_token_id=0)

    assert logits.shape == (20_000, 5)
    assert set(logits.argmax(axis=1).tolist()) == set(range(5))


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_it_runs_by_name_with_every_cache(kv):
    params = SamplingParams(max_tokens=40)
    (one, same, other) = LLM("hash", kv=kv, max_num_seqs=2).generate(["Once upon", "Once upon", "One"], params)

    assert one.outputs[0].text == same.outputs[0].text == "hcjt"
    assert one.outputs[0].text != other.outputs[0].text


def test_a_draft_has_a_name_and_nonsense_has_none():
    assert [create_hash_model(name)._agreement for name in ("hash", "hash:0.75", "hash:0")] == [1, 0.75, 0]
    for name in ("hash:", "hash:2", "hash:most", "hash:nan"):
        with pytest.raises(UsageError, match="between 0 and 1"):
            LLM(name)
    with pytest.raises(UsageError, match="no file"):
        resolve_model("hash")
    with pytest.raises(UsageError, match="unknown device"):
        LLM("hash", device="gpu")


def test_it_loads_neither_a_compiler_nor_a_file():
    code = (
        "import sys; from forge import LLM\n"
        "LLM('hash', kv='paged').generate('Once')\n"
        "print([name for name in ('numba', 'llvmlite', 'torch', 'tokenizers', 'jinja2') if name in sys.modules])"
    )

    assert printed_by(code) == "[]"
