"""`forge models synth` and `forge models pull`: options to shapes and names, and what is printed."""

import json
from collections.abc import Callable

import pytest
import typer

from forge.cli.models import pull, synthesize
from forge.errors import UsageError
from forge.gguf import GGUFFile
from forge.model.config import Qwen3Config
from forge.views.terminal import open_console
from tests.model.fake_hub import FakeHub, running

SIZES = ("--layers", "2", "--hidden", "64", "--ffn", "96", "--heads", "4", "--kv-heads", "2", "--vocab", "500")


@pytest.fixture
def models(capfd, tmp_path, monkeypatch) -> Callable[..., str]:
    """Run one of the two commands in an empty folder; returns what it printed, standard error being empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    app = typer.Typer()
    app.command("synth")(synthesize)
    app.command("pull")(pull)

    def run(*args: str) -> str:
        app(list(args), standalone_mode=False).draw(open_console())
        captured = capfd.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_a_shape_of_its_own_is_written_under_a_name_that_says_its_type(models, tmp_path):
    out = models("synth", *SIZES, "--type", "q4_0", "--head-dim", "32", "--context", "512", "--untied")

    assert out.startswith("synthetic-q4_0.gguf: ")
    with GGUFFile.open(tmp_path / "synthetic-q4_0.gguf") as file:
        config = Qwen3Config.from_gguf(file)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (500, 512, False)


def test_options_change_a_published_shape(models):
    small = ("--layers", "1", "--hidden", "64", "--ffn", "64", "--vocab", "400")
    made = json.loads(models("synth", "Qwen3-0.6B", *small, "-o", "m.gguf", "--json"))

    with GGUFFile.open(made["path"]) as file:
        config = Qwen3Config.from_gguf(file)
        assert made["bytes"] == file.size and made["tensors"] == len(file.tensors)
        assert sum(made["type_bytes"].values()) == sum(tensor.nbytes for tensor in file.tensors.values())
    assert (config.num_layers, config.num_attention_heads, config.head_dim) == (1, 16, 128)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--layers", "2"), "without a shape .* give --hidden, --ffn, --heads, --kv-heads"),
        (("qwen3-9b",), "unknown shape 'qwen3-9b'; there are qwen3-0.6b"),
        (("qwen3-0.6b", "--type", "Q3_K"), "unknown type 'Q3_K'"),
        (("qwen3-0.6b", "--vocab", "10"), "a vocabulary of 10 is too small"),
        (("qwen3-0.6b", "--seed", "-1"), "--seed must not be negative"),
    ],
)
def test_what_has_no_meaning_is_refused_and_nothing_is_written(models, tmp_path, args, words):
    with pytest.raises(UsageError, match=words):
        models("synth", *args)
    assert list(tmp_path.glob("*.gguf*")) == []


def test_a_pulled_model_is_printed_with_its_path_and_how_to_run_it(models, monkeypatch, tmp_path):
    with running(FakeHub(repos={"a/b": {"m-Q8_0.gguf": b"x" * 2000}})) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        out = models("pull", "a/b:q8_0")
        again = json.loads(models("pull", "a/b:q8_0", "--json"))

    path = tmp_path / "cache" / "forge" / "models" / "a" / "b" / "m-Q8_0.gguf"
    assert out == f"{path}: 2.0 kB\nrun it: forge generate --model a/b:Q8_0 ...\n"
    assert again == {"name": "a/b:Q8_0", "path": str(path), "bytes": 2000}
