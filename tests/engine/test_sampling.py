"""From a row of logits to a token, against `transformers`' own processors and against the distribution itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge.engine import rng
from forge.engine.rng import DrawName, gumbel, gumbel_argmax, token_words
from forge.engine.sampling import (
    BrokenLogits,
    Distribution,
    check_logits,
    choose,
    choose_token,
    distribution,
    filtered,
    log_sum_exp,
    masked,
    penalized,
    top_logprobs,
)
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import MatcherError
from forge.model.model import Draw

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch: pip install torch")
processors = pytest.importorskip(
    "transformers.generation.logits_process", reason="the oracle needs transformers: pip install transformers"
)

QWEN_VOCABULARY = 151_936


def row(seed: int, size: int = 1000, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def log_total(logits: np.ndarray) -> float:
    return log_sum_exp(logits, float(logits.max()))


def token(logits, history=(), seed=0, **params) -> int:
    return choose(np.asarray(logits, np.float32), Draw(SamplingParams(**params), seed, 0, history)).token_id


def transformers_probabilities(logits: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    """What `generate` would draw from: its processors in its order, in float64."""
    steps = [processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    steps.append(processors.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(processors.MinPLogitsWarper(params.min_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for step in steps:
        scores = step(torch.tensor([history]), scores)
    return scores.softmax(-1)[0].numpy()


def ours(logits: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    found = distribution(penalized(logits, Draw(params, 0, 0, history)), params)
    assert (np.diff(found.token_ids) > 0).all()
    out = np.zeros(len(logits))
    out[found.token_ids] = found.probabilities
    return out


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
    {"top_k": 700, "top_p": 0.99},
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_probabilities_are_those_of_transformers(filters, temperature):
    params = SamplingParams(temperature=temperature, **filters)
    for seed in range(5):
        logits = row(seed, spread=(0.1, 1.0, 3.0, 8.0, 30.0)[seed])
        history = np.random.default_rng(seed).integers(0, len(logits), 60).tolist()

        expected = transformers_probabilities(logits, history, params)
        actual = ours(logits, history, params)

        assert np.array_equal(actual > 1e-300, expected > 1e-300), f"other tokens are kept, seed {seed}"
        assert np.allclose(actual, expected, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_greedy_takes_the_likeliest_of_transformers_whatever_the_filters(filters):
    logits, history = row(3), [5, 6, 7]
    expected = transformers_probabilities(logits, history, SamplingParams(temperature=1.0, **filters)).argmax()

    assert token(logits, history, temperature=0.0, **filters) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits, history, count = row(11, size=20, spread=1.5), [0, 3, 4], 8_000
    expected = transformers_probabilities(logits, history, SamplingParams(**params)) * count

    drawn = np.bincount([token(logits, history, seed, **params) for seed in range(count)], minlength=20)

    assert not drawn[expected == 0].any(), "a token was drawn that the filters had taken out"
    kept = expected > 0
    chi_squared = ((drawn[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_squared < 45, "19 degrees of freedom at most: 99.9 % lie below 44"


def test_what_may_not_be_drawn_has_no_probability():
    found = Distribution(np.array([2, 5]), np.array([0.25, 0.75]))
    assert [found.probability(token_id) for token_id in (1, 2, 3, 5, 9)] == [0, 0.25, 0, 0.75, 0]
    matcher = SimpleNamespace(mask=lambda output: np.array([True, False]))
    with pytest.raises(MatcherError, match="no probability here"):
        masked(np.array([-np.inf, 1.0], np.float32), Draw(SamplingParams(), 0, 0, [], 0, matcher))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_is_the_fewest_that_reach_it(scale, top_p):
    logits = np.random.default_rng(3).standard_normal(40_000, np.float32) * np.float32(scale)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-weights, kind="stable")
    needed = np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum()) + 1

    found = distribution(logits, SamplingParams(temperature=1.0, top_p=top_p))

    assert found.token_ids.tolist() == sorted(order[:needed].tolist())


def test_a_sampled_token_which_nobody_asks_the_probability_is_the_same_token():
    logits = row(5)
    for params in (SamplingParams(temperature=0.9, top_k=7), SamplingParams(temperature=0.0, repetition_penalty=1.3)):
        draw = Draw(params, 1, 0, (4, 4, 7))
        told = choose(logits, draw)
        assert choose(logits, draw, wants_probability=False) == (told.token_id, None, None)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_sampled_token_is_the_argmax_of_the_kept_logits_with_their_noise(filters):
    params = SamplingParams(temperature=0.7, **filters)
    for seed in range(20):
        logits, draw = row(seed), Draw(params, seed, 2, [5, 6, 7])
        scores = penalized(logits, draw)
        kept = distribution(scores, params).token_ids
        sums = scores[kept] / np.float64(0.7) + gumbel(token_words(kept, DrawName.of(draw)))

        assert choose(logits, draw).token_id == kept[sums.argmax()]


def test_a_token_keeps_its_noise_whatever_else_is_kept():
    """So a draft with other logits mostly draws the same token."""
    logits = row(1, spread=1.0)
    same = 0
    for seed in range(300):
        near = logits + 0.1 * row(1000 + seed, spread=1.0)
        same += token(logits, seed=seed, temperature=1.0) == token(near, seed=seed, temperature=1.0, top_k=900)
    assert same > 240


def test_equal_logits_are_ranked_by_token_id_lower_first():
    logits = np.zeros(1000, np.float32)
    logits[[7, 400, 900]] = 1.0

    def kept(**filters):
        return distribution(logits, SamplingParams(temperature=1.0, **filters)).token_ids.tolist()

    assert token(logits) == 7
    assert kept(top_k=1) == [7]
    assert kept(top_k=2) == [7, 400]
    assert kept(top_k=5) == [0, 1, 7, 400, 900]
    assert kept(top_p=0.005) == [7, 400]
    assert kept(min_p=1.0) == [7, 400, 900]
    assert [i for i, _ in choose(logits, Draw(SamplingParams(logprobs=5), 0, 0, ())).logprobs] == [7, 400, 900, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 5000])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.999, 1 - 1e-12])
def test_all_equal_logits_keep_the_fewest_that_reach_top_p(size, top_p):
    found = distribution(np.full(size, -3.5, np.float32), SamplingParams(temperature=1.0, top_p=top_p))

    needed = max(1, int(np.ceil(top_p * size - 1e-6)))
    assert found.token_ids.tolist() == list(range(needed))
    assert np.allclose(found.probabilities, 1 / needed)


@pytest.mark.parametrize("top_k", [999, 1000, 1001, 10**9])
def test_top_k_of_the_whole_vocabulary_keeps_it(top_k):
    logits = row(2)
    found = distribution(logits, SamplingParams(temperature=1.0, top_k=top_k))

    assert len(found.token_ids) == min(top_k, 1000)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature):
    for seed in range(5):
        logits = row(seed)
        assert token(logits, temperature=temperature, seed=seed) == logits.argmax()


@pytest.mark.parametrize("temperature", [1e6, 1e300, 1.7e308])
def test_a_huge_temperature_is_uniform_over_what_is_possible(temperature):
    logits = row(4)
    logits[::2] = -np.inf
    found = distribution(logits, SamplingParams(temperature=temperature))

    assert found.token_ids.tolist() == list(range(1, 1000, 2))
    assert np.allclose(found.probabilities, 1 / 500, rtol=1e-4)


@pytest.mark.parametrize("filters", [{}, {"top_k": 10}, {"top_p": 0.9999999}, {"min_p": 0.0001}], ids=str)
def test_minus_infinity_is_never_drawn(filters):
    logits = np.full(600, -np.inf, np.float32)
    logits[[5, 300]] = [1.0, 1.1]
    params = SamplingParams(temperature=2.0, repetition_penalty=1.2, **filters)

    found = distribution(penalized(logits, Draw(params, 1, 0, [0, 5])), params)

    assert found.token_ids.tolist() == [5, 300]
    drawn = {choose(logits, Draw(params, seed, 0, [0, 5])).token_id for seed in range(50)}
    assert drawn == {5, 300}


def test_what_has_no_probability_is_not_drawn_even_with_the_greatest_noise(monkeypatch):
    lucky = np.array([0, 0, 0, 2**32 - 1, 2**32 - 1], np.uint64)
    monkeypatch.setattr(rng, "token_words", lambda token_ids, *name: lucky[token_ids])
    logits = np.array([0.0, 1.0, 0.5, -1e4, -1e5], np.float32)

    assert token(logits, temperature=1.0, top_k=5) == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(broken, temperature):
    logits = row(1)
    logits[77] = broken

    with pytest.raises(BrokenLogits, match="not finite"):
        token(logits, temperature=temperature)


def test_a_row_that_forbids_everything_is_an_error():
    with pytest.raises(BrokenLogits):
        check_logits(np.full(10, -np.inf, np.float32))


@pytest.mark.parametrize("penalty", [1e-300, 1e-46, 1e-40, 1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_absurd_penalty_still_gives_numbers(penalty, temperature):
    logits = np.array([0.0, 2.0, -2.0, 1.0, -np.inf], np.float32)
    scores = penalized(logits, Draw(SamplingParams(repetition_penalty=penalty), 0, 0, [0, 1, 2, 4]))

    assert np.isfinite(scores[:4]).all()
    assert scores[0] == 0.0
    assert scores[4] == -np.inf
    expected = 1 if penalty < 1 else 3
    assert token(logits, [0, 1, 2, 4], temperature=temperature, top_k=1, repetition_penalty=penalty) == expected


def test_a_repeated_token_is_penalized_once():
    logits = np.array([3.0, -3.0, 3.0], np.float32)

    draw = Draw(SamplingParams(repetition_penalty=2.0), 0, 0, [0, 0, 1, 1, 1])
    assert penalized(logits, draw).tolist() == [1.5, -6.0, 3.0]
    assert logits.tolist() == [3.0, -3.0, 3.0], "the logits themselves are left alone"


def test_the_probability_reported_is_the_models_own():
    logits = row(6, size=50)
    expected = torch.from_numpy(logits.astype(np.float64)).softmax(-1).numpy()

    choice = choose(logits, Draw(SamplingParams(temperature=0.2, top_k=3, repetition_penalty=2.0), 0, 0, [1, 2]))

    assert choice.probability == pytest.approx(expected[choice.token_id], rel=1e-5)


def test_logprobs_are_the_likeliest_in_order_and_the_chosen_one():
    logits = row(8, size=50)
    expected = torch.from_numpy(logits.astype(np.float64)).log_softmax(-1).numpy()
    order = np.argsort(-logits, kind="stable").tolist()

    inside = top_logprobs(logits, log_total(logits), 5, order[2])
    outside = top_logprobs(logits, log_total(logits), 5, order[20])
    alone = top_logprobs(logits, log_total(logits), 0, order[3])
    everything = top_logprobs(logits, log_total(logits), 99, order[3])

    assert [i for i, _ in inside] == order[:5]
    assert [i for i, _ in outside] == [*order[:5], order[20]]
    assert [i for i, _ in alone] == [order[3]]
    assert [i for i, _ in everything] == order
    assert [value for _, value in everything] == pytest.approx(expected[order].tolist(), rel=1e-5)
    assert top_logprobs(logits, log_total(logits), None, 0) is None


def test_log_sum_exp_of_extreme_rows_is_finite():
    for values in ([3e38, 3e38], [-3e38, -3e38], [1e4, -1e4], [0.0, -np.inf]):
        found = log_total(np.array(values, np.float32))
        assert found == pytest.approx(float(torch.tensor(values, dtype=torch.float64).logsumexp(0)), rel=1e-6)


SHAPES = {"peaked": 3.0, "flat": 0.01, "equal": 0.0}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_whole_vocabulary_is_partitioned_and_never_sorted(monkeypatch, shape):
    sorted_sizes = []
    for name in ("sort", "argsort", "lexsort"):

        def spy(values, *args, original=getattr(np, name), **kwargs):
            if np.asarray(values).dtype.kind == "f":
                sorted_sizes.append(np.asarray(values).shape[-1])
            return original(values, *args, **kwargs)

        monkeypatch.setattr(np, name, spy)
    logits = row(0, QWEN_VOCABULARY, SHAPES[shape])

    for params in ({"top_k": 50_000}, {"top_p": 0.95}, {"top_p": 0.999999, "top_k": 100_000}, {"min_p": 0.01}):
        token(logits, temperature=1.0, logprobs=20, **params)
    token(logits, logprobs=20)

    assert max(sorted_sizes) <= 256


def test_output_penalties_are_openais_definition_term_by_term():
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits = row(int(rng.integers(1000)), size=30)
        prompt, output = rng.integers(0, 30, 10).tolist(), rng.integers(0, 30, 20).tolist()
        presence, frequency = rng.uniform(-2, 2, 2)
        bias = {int(i): float(rng.uniform(-100, 100)) for i in rng.choice(30, 5, replace=False)}
        params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)

        found = penalized(logits, Draw(params, 0, 0, [*prompt, *output], len(prompt)))

        expected = [
            float(logit) + bias.get(i, 0.0) - output.count(i) * frequency - float(output.count(i) > 0) * presence
            for i, logit in enumerate(logits)
        ]
        np.testing.assert_array_equal(found, np.array(expected).astype(np.float32))


def test_a_bias_decides_and_minus_infinity_stays_never():
    logits = np.array([0.0, 1.0, -np.inf], np.float32)
    assert token(logits, logit_bias={0: 5.0}) == 0
    assert token(logits, logit_bias={2: 100.0}) == 1
    assert token(logits, logit_bias={1: -100.0}, temperature=1.0) == 0


def test_logits_that_nothing_changes_are_the_same_array():
    logits = row(3, size=20)
    assert penalized(logits, Draw(SamplingParams(), 0, 0, [1, 2])) is logits


class Allows:
    """A matcher that allows the same tokens everywhere."""

    def __init__(self, allowed: np.ndarray):
        self.allowed = allowed

    def mask(self, output) -> np.ndarray:
        return self.allowed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9),
        SamplingParams(9, logit_bias={3: 2.0}, repetition_penalty=1.3),
        SamplingParams(9, 1.0),
        SamplingParams(9, 0.7, top_k=5, min_p=0.05),
        SamplingParams(9, 1.5, top_p=0.8, presence_penalty=0.5),
    ],
    ids=str,
)
def test_a_constrained_choice_is_that_from_the_masked_row(params):
    rng = np.random.default_rng(1)
    for seed in range(200):
        logits = rng.standard_normal(64).astype(np.float32) * 3
        matcher = Allows(rng.random(64) < rng.choice([0.03, 0.3, 0.9]))
        matcher.allowed[rng.integers(64)] = True
        draw = Draw(params, seed, 0, [1, 2, 3], 2, matcher)
        row = masked(penalized(logits, draw), draw)
        expected = int(row.argmax()) if params.greedy else gumbel_argmax(*filtered(row, params), DrawName.of(draw))
        assert choose_token(logits, draw) == choose_token(logits, draw, int(logits.argmax())) == expected
        assert matcher.allowed[expected]
