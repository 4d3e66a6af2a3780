"""Grammars over the bundled model's vocabulary."""

import pytest

from forge.grammar.compiler import GrammarCompiler
from forge.model.catalog import resolve_model
from forge.model.loader import open_weights
from forge.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with open_weights(resolve_model("tales")) as weights:
        return Tokenizer(weights.tokenizer_spec())


@pytest.fixture(scope="session")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)
