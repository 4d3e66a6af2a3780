"""`cpu` against `reference`: the same model, to the accuracy of its activations."""

from pathlib import Path

import numpy as np
import pytest

from forge.backends.reference import ReferenceBackend
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from forge.tokenizer import Tokenizer
from tests.backends.cpu.models import FLOATS, QUANTIZED, ROOT, ThreadedBackend, small_model

BUNDLED = ROOT / "models" / "tales-q8_0.gguf"
PROMPTS = ("Once upon a time", "The little fox", "User: Who are you?", "In the morning", "She said", "One day a bear")
NEW_TOKENS = 24
NEAR_TIE = 0.05
"""Of the logits' spread: how close two tokens must be for int8 activations to swap them."""


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("tensor_type", [*FLOATS, *QUANTIZED])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_logits_are_those_of_the_reference(tensor_type, tie):
    tokens = np.random.default_rng(1).integers(0, 288, 70).tolist()
    want = one_prefill(small_model(ReferenceBackend(), tensor_type, seed=2, tie=tie), tokens)
    model = small_model(ThreadedBackend(2), tensor_type, seed=2, tie=tie)
    got = one_prefill(model, tokens)
    model.backend._pool.close()

    error = relative_error(got, want)

    print(f"{tensor_type}: relative error of the logits {error:.1e}")
    assert error < (1e-5 if tensor_type in FLOATS else 3e-2)
    if tensor_type in FLOATS:
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("sizes", [
    {"hidden_size": 20, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 37},
    {"hidden_size": 132, "head_dim": 50, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1003},
    {"hidden_size": 64, "head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 16},
    {"rope_theta": 1e4, "num_layers": 5},
], ids=["odd", "large and odd", "one head", "five layers"])  # fmt: skip
def test_odd_sizes_are_those_of_the_reference(sizes):
    tokens = np.random.default_rng(3).integers(0, 288, 40).tolist()
    want = one_prefill(small_model(ReferenceBackend(), "F32", seed=4, tie=False, **sizes), tokens)
    model = small_model(ThreadedBackend(2), "F32", seed=4, tie=False, **sizes)
    got = one_prefill(model, tokens)
    model.backend._pool.close()
    assert relative_error(got, want) < 1e-5


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """`count` tokens, each the argmax after those before it, one forward each over a paged storage."""
    storage = new_storage(model, 16, 16, "float16")
    tokens, start = list(prompt), 0
    for _ in range(count):
        part = Part(tokens, start, len(tokens), list(range(16)))
        logits = model.forward(flat_batch([part], 16, logit_rows=[len(tokens) - 1 - start]), storage)
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens


@pytest.mark.skipif(not Path(BUNDLED).exists(), reason="the bundled model has not been built")
def test_the_bundled_model_says_what_it_says_on_the_reference_or_two_tokens_nearly_tie():
    """The reference follows the tokens of `cpu`, so that one pass over all of them gives its choice at every step."""
    with open_weights(BUNDLED) as source:
        model, reference = load_qwen3(source, ThreadedBackend(2)), load_qwen3(source, ReferenceBackend())
        tokenizer = Tokenizer(source.tokenizer_spec())
    differing = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        tokens = greedy(model, prompt, NEW_TOKENS)
        logits = one_prefill(reference, tokens[:-1])[len(prompt) - 1 :]
        for step, (row, chosen) in enumerate(zip(logits, tokens[len(prompt) :], strict=True)):
            if int(row.argmax()) != chosen:
                margin = float((row.max() - row[chosen]) / (row.max() - row.min()))
                tokens_told = f"{row.argmax()} on reference, {chosen} here"
                print(f"{text!r}, step {step}: {tokens_told}, {margin:.4f} of the spread apart")
                differing.append(margin)
    model.backend._pool.close()
    print(f"{len(PROMPTS) * NEW_TOKENS - len(differing)} of {len(PROMPTS) * NEW_TOKENS} tokens equal")
    assert max(differing, default=0.0) <= NEAR_TIE
    assert len(differing) <= 0.05 * len(PROMPTS) * NEW_TOKENS
