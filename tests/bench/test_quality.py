"""`forge bench quality`: the mathematics against float64, and a run of tiny models."""

import json
import math
import shutil

import numpy as np
import pytest

from forge import LLM
from forge.bench import quality
from forge.bench.quality import bench_quality, divergences, negative_log_likelihood, perplexity
from forge.cache.kv_storage import KV_DTYPES
from forge.cli.main import main
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from tests.small_models import write_small_qwen3


def run(models, kv_dtypes=None, devices=None, text=None, tokens=2048, threads=None):
    text = text and str(text)
    return bench_quality.measure(
        lambda text: None, models, kv_dtypes, devices, text, tokens, engine=EngineArgs(threads=threads)
    )


TEXT = "There is a hen in the tree at the inn, and the other hen is on the roof. " * 3


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [
        str(write_small_qwen3(folder / f"small-{kind}.gguf", tensor_type=kind, num_layers=1))
        for kind in ("Q8_0", "Q4_0")
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def logits(seed: int, rows: int = 150, vocab: int = 40, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def softmax(values: np.ndarray) -> list[list[float]]:
    """One value at a time, in Python's own floats."""
    out = []
    for row in values.tolist():
        exps = [math.exp(value) for value in row]
        out.append([value / math.fsum(exps) for value in exps])
    return out


def test_perplexity_is_what_plain_arithmetic_gives():
    values, following = logits(1), np.random.default_rng(2).integers(0, 40, 150).tolist()
    nll = -math.fsum(math.log(p[token]) for p, token in zip(softmax(values), following, strict=True))
    assert negative_log_likelihood(values, following) == pytest.approx(nll, rel=1e-12)
    assert perplexity(nll, 150) == pytest.approx(math.exp(nll / 150), rel=1e-12)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary():
    nll = negative_log_likelihood(np.zeros((10, 40), np.float32), [3] * 10)
    assert perplexity(nll, 10) == pytest.approx(40)


def test_divergence_is_what_plain_arithmetic_gives():
    p, q = logits(1), logits(1) + logits(3, scale=0.1)
    expected = [
        math.fsum(a * math.log(a / b) for a, b in zip(*rows, strict=True))
        for rows in zip(softmax(p), softmax(q), strict=True)
    ]
    assert divergences(p, q) == pytest.approx(expected, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 1.0, 50.0])
def test_divergence_is_never_negative(scale):
    p = logits(4, scale=10.0)
    assert (divergences(p, p + logits(5, scale=scale)) >= 0).all()


def test_equal_logits_do_not_diverge_at_all():
    assert (divergences(logits(6), logits(6)) == 0).all()


def test_the_same_variant_twice_is_the_same(models, text):
    result = run(models[:1], kv_dtypes=["float32"], devices=["reference"], text=text, tokens=40)
    (only,) = result["variants"]
    (against,) = only["against"]
    assert against["kl"] == against["kl_max"] == 0 and against["top1_agreement"] == 1


def test_a_copy_of_a_file_is_as_good_as_the_file(models, text, tmp_path):
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(models[0], copy)
    result = run([models[0], str(copy)], kv_dtypes=["float16"], devices=["reference"], text=text, tokens=40)
    by_variant = {(one["model"], one["kv_dtype"]): one for one in result["variants"]}
    for dtype in ("float32", "float16"):
        original, copied = by_variant[models[0], dtype], by_variant[str(copy), dtype]
        assert original["perplexity"] == copied["perplexity"]
        assert [one["kl"] for one in copied["against"]] == [original["against"][0]["kl"]] * 2
    assert by_variant[models[0], "float16"]["against"][0]["kl"] > 0


def test_perplexity_of_a_run_is_that_of_the_models_logits(models, text, monkeypatch):
    monkeypatch.setattr(quality, "WINDOW", 32)
    result = run(models[:1], kv_dtypes=["float32"], devices=["reference"], text=text, tokens=70)
    llm = LLM(models[0], device="reference", kv_dtype="float32")
    ids = llm.tokenizer.encode(TEXT)[:70]
    total, predicted = 0.0, 0
    for window in (ids[:32], ids[32:64], ids[64:70]):
        chances = softmax(llm.logits(window))
        total -= math.fsum(math.log(chances[i][window[i + 1]]) for i in range(len(window) - 1))
        predicted += len(window) - 1
    assert (result["tokens"], result["windows"], result["window"]) == (predicted, 3, 32)
    assert result["variants"][0]["perplexity"] == pytest.approx(math.exp(total / predicted), rel=1e-9)


def test_a_quantization_is_held_against_the_first_model_too(models, text):
    result = run(models, kv_dtypes=["float16"], text=text, tokens=40, threads=1)
    rows = [(one["device"], one["kv_dtype"]) for one in result["variants"]]
    assert rows == [("reference", "float32"), ("cpu", "float16")] * 2
    assert [len(one["against"]) for one in result["variants"]] == [1, 1, 2, 2]
    own, first = result["variants"][2]["against"]
    assert own["kl"] == 0 < first["kl"]
    found = json.loads(json.dumps(result))
    assert [one["device"] for one in found["variants"]] == ["reference", "cpu"] * 2
    assert set(found["variants"][0]) == {"model", "device", "kv_dtype", "perplexity", "against"}


def test_other_vocabularies_are_refused(models, text, tmp_path):
    other = str(write_small_qwen3(tmp_path / "other.gguf", vocab_size=300))
    with pytest.raises(UsageError, match="different vocabularies"):
        run([models[0], other], text=text, tokens=10, devices=["reference"])


@pytest.mark.parametrize(("content", "message"), [(b"", "too short"), (b"\xff", "not UTF-8")])
def test_a_text_that_is_none_is_refused(models, tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        run(models[:1], text=path, devices=["reference"])


def test_a_text_that_is_not_there_is_refused_before_anything_is_loaded(models, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "LLM", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UsageError, match="No such file"):
        run(models[:1], text=tmp_path / "none.txt", devices=["reference"])


def test_the_bundled_text_is_held_out_of_the_training():
    documents = pytest.importorskip("models.corpus.documents")
    text = quality.HELD_OUT.read_text(encoding="utf-8")
    first = documents.HELD_OUT + 5_000_000
    parts = [part for part in text.split("<|endoftext|>") if part]
    assert parts == [documents.document(first + number) for number in range(len(parts))]


def test_the_command_prints_a_table(models, text, capsys):
    arguments = ["quality", "-m", models[0], "--text", str(text), "--tokens", "30", "--kv-dtype", "float16"]
    assert main(["bench", *arguments, "--device", "reference"]) == 0
    out = capsys.readouterr().out
    assert "29 tokens predicted in 1 window" in " ".join(out.split())
    assert "100.00 %" in out and "small-Q8_0 " in out


def test_an_unknown_kv_dtype_is_refused(models, capsys):
    assert main(["bench", "quality", "-m", models[0], "--kv-dtype", "int3"]) == 2
    assert "unknown kv dtype 'int3'" in capsys.readouterr().err


def test_what_the_device_has_not_is_refused_before_anything_is_loaded(models, capsys):
    arguments = ["bench", "quality", "-m", models[0], "--device", "cpu", "--device", "cuda", "--kv-dtype", "int8"]
    assert main(arguments) == 2
    assert "--kv-dtype int8 is not for --device cuda" in capsys.readouterr().err


def test_without_a_kv_dtype_all_are_compared(models, text):
    result = run(models[:1], devices=["reference"], text=text, tokens=20)
    assert {one["kv_dtype"] for one in result["variants"]} == set(KV_DTYPES)
    loss = {one["kv_dtype"]: one["against"][0]["kl"] for one in result["variants"] if one["device"] == "reference"}
    assert loss["float32"] == 0 < loss["float16"] < loss["int8"] < 0.01
