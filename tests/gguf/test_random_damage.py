"""Whatever is done to the bytes of a file: it loads, or a `GGUFError` says why, and never anything else.

"Loads" goes all the way: header, hyper-parameters, tensor check, and every weight multiplied out. The seeded driver
does many quick mutations; the property test fewer, but shrinks what it finds. FORGE_HYPOTHESIS_PROFILE=fuzz looks much
further.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.gguf import GGUFError, GGUFFile
from forge.model.config import Qwen3Config, check_tensors
from tests.gguf.raw_file import HUGE_NUMBERS, checked, overwrite
from tests.small_models import write_small_qwen3

SIZES = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 270,
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> tuple[bytes, int]:
    """A small valid file and the length of its header, which is where damage does most."""
    path = write_small_qwen3(tmp_path_factory.mktemp("damage") / "valid.gguf", tensor_type="Q8_0", **SIZES)
    with GGUFFile.open(path) as file:
        return path.read_bytes(), file.data_offset


@pytest.fixture(scope="module")
def damaged_path(tmp_path_factory):
    return tmp_path_factory.mktemp("damage") / "damaged.gguf"


def loads(path, data: bytes) -> bool:
    """Whether `data` is a usable model. Any exception but GGUFError, and any unfit message, fails the test."""
    overwrite(path, data)
    try:
        with GGUFFile.open(path) as file:
            config = Qwen3Config.from_gguf(file)
            check_tensors(file, config)
            for tensor in file.tensors.values():
                assert tensor.dequantize().shape == tensor.shape
        return True
    except GGUFError as error:
        checked(error, path)
        return False


def test_the_undamaged_file_loads(valid, damaged_path):
    assert loads(damaged_path, valid[0])


@st.composite
def damage(draw, data: bytes, header: int) -> bytes:
    """`data` after one to four of: bits flipped, numbers replaced, pieces cut off, taken out, copied, put in."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(len(out), header + 64) - 1)))
        match draw(st.sampled_from(["flip", "bytes", "number", "truncate", "cut", "splice", "insert"])):
            case "flip" if out:
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "bytes":
                new = draw(st.binary(min_size=1, max_size=12))
                out[at : at + len(new)] = new
            case "number":
                width = draw(st.sampled_from([4, 8]))
                value = draw(st.one_of(st.sampled_from(HUGE_NUMBERS), st.integers(0, 2**64 - 1), st.integers(0, 300)))
                out[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
            case "truncate":
                del out[at:]
            case "cut":
                del out[at : at + draw(st.integers(1, 200))]
            case "splice":
                start = draw(st.integers(0, len(data) - 1))
                piece = data[start : start + draw(st.integers(1, 200))]
                out[at : at + len(piece)] = piece
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=40))
    return bytes(out)


@given(choices=st.data())
def test_any_damage_loads_or_is_a_gguf_error(valid, damaged_path, choices):
    loads(damaged_path, choices.draw(damage(*valid)))


def mutated(data: bytes, header: int, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, min(len(out), header)))
        kind = rng.randrange(5)
        if kind == 0 and out:
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at : at + 8] = rng.choice(HUGE_NUMBERS).to_bytes(8, "little")
        elif kind == 2:
            del out[rng.randrange(len(out) + 1) :]
        elif kind == 3:
            start, length = rng.randrange(header), rng.randint(1, 64)
            out[at : at + length] = data[start : start + length]
        else:
            out[at : at + 4] = rng.randrange(16).to_bytes(4, "little")
    return bytes(out)


def test_thousands_of_seeded_mutations_load_or_are_gguf_errors(valid, damaged_path):
    outcomes = [loads(damaged_path, mutated(*valid, random.Random(seed))) for seed in range(3_000)]
    assert 0 < sum(outcomes) < len(outcomes)  # some damage is harmless (a name, a weight), most is not


def test_every_byte_of_the_fixed_header_and_the_directory(valid, damaged_path):
    """Each byte of the first 64 and of the tensor directory, changed alone: its highest bit, and another."""
    data, header = valid
    for at in (*range(64), *range(data.index(b"token_embd.weight") - 8, header)):
        for bit in (7, at % 7):
            out = bytearray(data)
            out[at] ^= 1 << bit
            loads(damaged_path, bytes(out))
