"""Proposers for a scripted engine, and a target that they may agree with."""

from collections.abc import Sequence

import numpy as np

from forge.cache.factory import CacheSize, create_kv_cache
from forge.cache.kv_storage import KvLayout, NumpyKvStorage
from forge.engine.proposer import Proposer
from forge.speculation.controller import Costs
from forge.speculation.draft import DraftProposer
from forge.speculation.speculator import Speculator
from forge.speculation.verification import Acceptance
from tests.engine.scripted import PIECES, Script, ScriptedModel, muddled

VOCAB = len(PIECES)
FREE = Costs(0.001)
"""So cheap that guessing always pays."""


def scripted_draft(script=muddled, *, kv="basic", num_runs=8, max_model_len=48, block_size=4, name="draft"):
    size = CacheSize(max_model_len, num_runs, block_size, 8)
    cache, num_blocks = create_kv_cache(kv, size)
    storage = NumpyKvStorage(KvLayout(1, num_blocks, block_size, 1, 1))
    return DraftProposer(
        ScriptedModel(script, VOCAB), cache, storage, vocab_size=VOCAB, max_model_len=max_model_len, name=name
    )


def wrong_now_and_then(script: Script = muddled, every: int = 3, offset: int = 0) -> Script:
    """A draft's script: it agrees with `script` but for every so many lengths of text."""

    def says(tokens: list[int]) -> np.ndarray:
        logits = script(tokens)
        return -logits if len(tokens) % every == offset else logits

    return says


def speculator(
    *proposers: Proposer, k: int = 4, fixed: bool = True, costs: Costs = FREE, acceptance: Acceptance = "gumbel"
) -> Speculator:
    priced = [(proposer, costs) for proposer in proposers]
    return Speculator(priced, max_k=k, vocab_size=VOCAB, fixed=fixed, acceptance=acceptance)


def texts_of(outputs) -> Sequence[list[int]]:
    """What every sample of some finished requests says, prompt included, for a `ReplayProposer`."""
    return [[*output.prompt_token_ids, *one.token_ids] for output in outputs for one in output.outputs]
