from dataclasses import dataclass
from enum import IntEnum

import pytest

from forge.views.json_output import plain
from forge.views.models import (
    ListedModel,
    TensorLine,
    grouped,
    inspection,
    inspection_screen,
    main_type,
    models_screen,
    parameter_count,
)
from forge.views.screen import draw
from tests.views.records import piped, written


class Type(IntEnum):
    F32 = 0
    Q8_0 = 8


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    ggml_type: Type
    nbytes: int
    offset: int = 0


TENSORS = [
    Tensor("token_embd.weight", (100, 32), Type.Q8_0, 3400),
    *[Tensor(f"blk.{layer}.attn_q.weight", (32, 32), Type.Q8_0, 1088) for layer in (0, 1, 2, 5)],
    Tensor("output_norm.weight", (32,), Type.F32, 128),
]
METADATA = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 6,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


def inspected(metadata=METADATA, tensors=TENSORS, width=80, everything=False):
    console = piped(width)
    about = {"path": "m.gguf", "bytes": 9000, "version": 3, "alignment": 32}
    draw(console, inspection_screen(about | inspection(metadata, list(tensors)), everything))
    return written(console)


def test_the_type_is_that_of_most_parameters():
    assert main_type(TENSORS) == "Q8_0"
    assert main_type([]) is None
    assert parameter_count(TENSORS) == 3200 + 4 * 1024 + 32


def test_a_file_is_described_in_full():
    out = inspected()
    for expected in ("GGUF version 3", "qwen3.block_count", "gpt2 (qwen2)", 'eos 2 "<|im_end|>"', "chat template yes"):
        assert expected in out
    assert "blk.0-2,5.attn_q.weight" in out and "4 layers" in out
    assert "= 1,536 numbers, 6.1 kB in float32, 3.1 kB in float16, 1.6 kB in int8" in " ".join(out.split())


def test_all_lists_every_tensor():
    out = inspected(everything=True)
    assert "blk.5.attn_q.weight" in out and "0-2" not in out


def test_layers_of_another_type_are_another_line():
    lines = grouped([TensorLine("blk.0.v", (2,), "Q4_K", 1), TensorLine("blk.1.v", (2,), "Q6_K", 1)])
    assert [line.name for line in lines] == ["blk.0.v", "blk.1.v"]


def test_a_file_of_another_architecture_or_with_nothing_in_it_can_still_be_looked_into():
    assert "llama" in inspected({"general.architecture": "llama"})
    assert "GGUF version 3" in inspected({}, [])


def test_strings_of_the_file_are_made_harmless():
    evil = "\x1b[2J\x9b[red]x[/red]\n" + "long " * 100
    out = inspected(
        METADATA
        | {"general.name": evil, evil: "x", "tokenizer.ggml.tokens": ["a", "b", evil], "tokenizer.ggml.pre": evil},
        [Tensor(evil, (1,), Type.F32, 4)],
    )
    assert "\x1b" not in out and "\x9b" not in out and "[red]x[/red]" in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_inspection_fits_its_width(width):
    assert max(map(len, inspected(width=width).splitlines())) <= width


def test_the_json_object_has_every_tensor():
    found = plain(inspection(METADATA, TENSORS))
    assert len(found["tensors"]) == len(TENSORS)
    assert found["kv_bytes_per_token"] == {"float32": 6144, "float16": 3072, "int8": 1632}
    assert found["hyper_parameters"]["qwen3.block_count"] == 6


def test_the_list_says_what_is_missing_or_broken():
    here = ListedModel("tales-q8_0", ("tales",), "models/t.gguf", 7_700_000, "tells tales", True, "Q8_0", 7_100_000)
    gone = ListedModel("tales-q4_0", (), "models/u.gguf", 0, "the same", False)
    broken = ListedModel("bad", (), "models/b.gguf", 3, "no", True, trouble="not a GGUF file")
    console = piped()
    draw(console, models_screen([here, gone, broken]))
    out = written(console)
    assert "tales-q8_0, tales" in out and "7.1 M" in out and "7.7 MB" in out and "tells tales" in out
    assert "make models" in out and "not a GGUF file" in out
