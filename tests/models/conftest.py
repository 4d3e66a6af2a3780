"""Tests of the recipe that trains the bundled models: a tiny network, the bundled tokenizer, nothing compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from models.export import load  # noqa: E402
from models.network import Config, Qwen3  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "models" / "tales-draft-q8_0.gguf"
TINY = Config(
    "tiny", block_count=2, embedding_length=32, head_count=2, head_count_kv=1, head_dim=16, feed_forward_length=64
)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="session")
def tokenizer():
    return load(BUNDLED)[1]


@pytest.fixture
def tiny() -> Qwen3:
    return Qwen3(TINY, seed=1)
