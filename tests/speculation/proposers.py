"""Proposers for a scripted engine, and a target that they may agree with."""

from collections.abc import Sequence

import numpy as np

from forge.engine.proposer import Proposer
from forge.speculation.controller import Costs
from forge.speculation.draft import DraftProposer
from forge.speculation.speculator import Speculator
from forge.speculation.verification import Acceptance
from tests.engine.scripted import PIECES, Script, ScriptedModel, muddled

VOCAB = len(PIECES)
FREE = Costs(0.001)
"""So cheap that guessing always pays."""


def scripted_draft(script=muddled, *, max_num_seqs=8, max_model_len=48, vocab_size=VOCAB, block_size=4, **options):
    """options: `kv` and `name`, of `DraftProposer`."""
    limits = {"vocab_size": vocab_size, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    return DraftProposer(ScriptedModel(script, VOCAB), block_size=block_size, **limits, **options)


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
