"""Constrained sampling has the renormalised distribution exactly, with and without draft tokens, by either rule.

The grammar is a table: which of eight tokens may follow which. So what a position's token is distributed like can be
computed by multiplying matrices.
"""

import numpy as np
import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from tests.engine.scripted import new_engine, run_all
from tests.speculation.proposers import VOCAB, scripted_draft, speculator
from tests.speculation.small_chain import FIRST, Chain, chi_squared_deviation
from tests.speculation.small_chain import VOCAB as SMALL

NUM_TOKENS, SAMPLES = 4, 500
BEYOND_CHANCE = 5.0
FORM = StructuredOutput(regex="stands for the table below")


class Table:
    """A `Grammar` and its matcher: bool `[SMALL, SMALL]`, which token may follow which."""

    def __init__(self, allowed: np.ndarray):
        self.allowed = allowed

    @classmethod
    def random(cls, seed: int) -> "Table":
        allowed = np.random.default_rng(seed).random((SMALL, SMALL)) < 0.5
        allowed[:, 0], allowed[:, 1] = False, True  # 0 ends a sequence
        return cls(allowed)

    def new_matcher(self):
        return self

    def mask(self, output):
        mask = np.zeros(VOCAB, bool)
        mask[:SMALL] = self.allowed[output[-1] if output else FIRST]
        return mask

    def num_allowed(self, output, token_ids):
        before = [output[-1] if output else FIRST, *token_ids]
        steps = [bool(self.allowed[one, other]) for one, other in zip(before, token_ids, strict=False)]
        return (*steps, False).index(False)

    def forced(self, output):
        return ()

    def masked(self, chain: Chain) -> Chain:
        return Chain(np.where(self.allowed, chain.logits, -np.inf).astype(np.float32))


def script(chain: Chain):
    def says(tokens: list[int]) -> np.ndarray:
        logits = np.full(VOCAB, -20, np.float32)
        logits[:SMALL] = chain.logits[tokens[-1]]
        return logits

    return says


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("acceptance", ["gumbel", "rejection"])
@pytest.mark.parametrize("kind", ["none", "near", "other", "hostile", "two"])
def test_tokens_have_the_renormalised_distribution(kind, acceptance, seeds):
    target, table = Chain.random(1), Table.random(14)
    drafts = {
        "none": [],
        "near": [target.near(2, 0.5)],
        "other": [Chain.random(5)],  # cutting its refused tokens would show: 344 in chi-squared at the second position
        "hostile": [target.hostile()],
        "two": [target.near(2, 1), target.near(3, 1)],
    }[kind]
    proposers = [scripted_draft(script(chain), name=f"{index}", max_num_seqs=64) for index, chain in enumerate(drafts)]
    speculation = speculator(*proposers, k=3, acceptance=acceptance) if proposers else None
    engine = new_engine(script(target), kv="paged", num_blocks=512, max_num_seqs=64, speculation=speculation)
    engine.compile_grammar = lambda structured: table
    for seed in range(seeds):
        params = SamplingParams(max_tokens=NUM_TOKENS, n=SAMPLES, seed=seed, temperature=0.9, structured=FORM)
        engine.add_request(f"{seed}", [FIRST], params)
    records = run_all(engine)
    said = np.array([one.token_ids for seed in range(seeds) for one in engine.output(f"{seed}").outputs])

    verified = [verdict for record in records for cycle in record.cycles for verdict in cycle.verdicts]
    if proposers:
        assert 0 < sum(verdict.accepted for verdict in verified) < len(verified)
    odds = np.zeros(SMALL)
    odds[FIRST] = 1.0
    transitions = table.masked(target).transitions(params)
    for position in range(NUM_TOKENS):
        odds = odds @ transitions
        counts = np.bincount(said[:, position], minlength=SMALL)
        assert chi_squared_deviation(counts, odds) < BEYOND_CHANCE, f"position {position}"
