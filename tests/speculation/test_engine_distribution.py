"""What the engine emits under sampling with a draft is distributed as what the target alone says, position by position.

`test_distribution` shows it of the rule with many more samples; here it is of the engine that applies it.
"""

import numpy as np
import pytest

from forge.engine.sampling_params import SamplingParams
from tests.engine.scripted import new_engine, run_all
from tests.speculation.proposers import VOCAB, scripted_draft, speculator
from tests.speculation.small_chain import FIRST, Chain, chi_squared_deviation
from tests.speculation.small_chain import VOCAB as SMALL

NUM_TOKENS, SAMPLES = 5, 500
BEYOND_CHANCE = 5.0
"""Standard deviations: chance goes that far about once in three million times."""


def script(chain: Chain):
    """The chain over the first tokens of a larger vocabulary, of which no other is ever drawn."""

    def says(tokens: list[int]) -> np.ndarray:
        logits = np.full(VOCAB, -np.inf, np.float32)
        logits[:SMALL] = chain.logits[tokens[-1]]
        return logits

    return says


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["near", "hostile", "two"])
@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"temperature": 1.2, "top_k": 5, "top_p": 0.9}], ids=str)
def test_tokens_are_drawn_as_by_the_target_alone(kind, changes, seeds):
    target = Chain.random(1)
    drafts = {
        "near": [target.near(2, 0.5)],
        "hostile": [target.hostile()],
        "two": [target.near(2, 1), target.near(3, 1)],
    }
    proposers = [
        scripted_draft(script(chain), name=f"{index}", max_num_seqs=64) for index, chain in enumerate(drafts[kind])
    ]
    engine = new_engine(
        script(target), kv="paged", num_blocks=512, max_num_seqs=64, speculation=speculator(*proposers, k=3)
    )
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, n=SAMPLES, seed=seed, ignore_eos=True, **changes) for seed in range(seeds)
    ]
    for seed, one in enumerate(params):
        engine.add_request(f"{seed}", [FIRST], one)
    records = run_all(engine)
    said = np.array([one.token_ids for seed in range(seeds) for one in engine.output(f"{seed}").outputs])

    verified = [verdict for record in records for cycle in record.cycles for verdict in cycle.verdicts]
    assert 0 < sum(verdict.accepted for verdict in verified) < len(verified)
    odds = np.zeros(SMALL)
    odds[FIRST] = 1.0
    for position in range(NUM_TOKENS):
        odds = odds @ target.transitions(params[0])
        counts = np.bincount(said[:, position], minlength=SMALL)
        assert chi_squared_deviation(counts, odds) < BEYOND_CHANCE, f"position {position}"
