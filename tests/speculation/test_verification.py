"""Which proposed tokens stand, row by row; distributions are `test_distribution`'s."""

import numpy as np
import pytest

from forge.engine.proposer import NO_PROPOSAL, Proposal
from forge.engine.rng import DrawName, Purpose, uniform
from forge.engine.sampling import BrokenLogits, Distribution, choose, distribution
from forge.engine.sampling_params import SamplingParams
from forge.model.model import Draw
from forge.speculation.verification import residual, verify_argmax, verify_drafts
from tests.speculation.requests import tokens_of
from tests.speculation.small_chain import verify

VOCAB = 12
GREEDY = SamplingParams()


def rows_saying(token_ids: list[int]) -> np.ndarray:
    rows = np.zeros((len(token_ids), VOCAB), np.float32)
    rows[range(len(token_ids)), token_ids] = 3.0
    return rows


def random_rows(seed: int, count: int) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal((count, VOCAB))).astype(np.float32)


def certain(token_id: int) -> Distribution:
    return Distribution(np.array([token_id]), np.ones(1))


def run(rows, proposal, params=GREEDY, history=(1, 2), seed=5, sample_index=0):
    proposal = proposal if isinstance(proposal, Proposal) else Proposal(tuple(proposal))
    return verify(rows, proposal, Draw(params, seed, sample_index, history))


# Greedy


@pytest.mark.parametrize(
    ("proposed", "accepted", "emitted"),
    [
        ([7, 8, 9], 3, (7, 8, 9, 3)),  # all, and the bonus token
        ([7, 8, 4], 2, (7, 8, 9)),
        ([7, 4, 9], 1, (7, 8)),  # the last would have agreed, had the one before it
        ([4, 8, 9], 0, (7,)),
        ([], 0, (7,)),
    ],
)
def test_greedy_accepts_the_longest_agreeing_prefix_and_adds_one_token_of_the_targets(proposed, accepted, emitted):
    result = run(rows_saying([7, 8, 9, 3][: len(proposed) + 1]), proposed)

    assert (tokens_of(result), result.num_accepted) == (emitted, accepted)
    decided = len(proposed) if accepted == len(proposed) else accepted + 1
    assert [verdict.accepted for verdict in result.by_draft[0]] == [True] * accepted + [False] * (decided - accepted)
    assert [verdict.target_argmax for verdict in result.by_draft[0]] == [7, 8, 9][:decided]
    assert [verdict.token_id for verdict in result.by_draft[0]] == proposed[:decided]


def one_by_one(rows_after, params, history, seed, count):
    """The oracle: plain decoding, one `choose` per token. `rows_after(tokens)` are the logits."""
    tokens, choices = list(history), []
    for _ in range(count):
        choices.append(choose(rows_after(tokens), Draw(params, seed, 0, tuple(tokens))))
        tokens.append(choices[-1].token_id)
    return choices


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(repetition_penalty=1.5, logprobs=3)], ids=["", "penalty"])
@pytest.mark.parametrize("seed", range(40))
def test_greedy_choices_are_those_of_plain_decoding_for_any_proposal(params, seed):
    rng = np.random.default_rng(seed)

    def rows_after(tokens):
        return random_rows(hash(tuple(tokens)) % 2**32, 1)[0]

    history = [1, 2]
    plain = one_by_one(rows_after, params, history, 0, 6)
    proposed = [choice.token_id for choice in plain[:5]]
    for index in rng.integers(0, 5, size=rng.integers(0, 3)):
        proposed[index] = int(rng.integers(VOCAB))
    rows = np.stack([rows_after([*history, *proposed[:index]]) for index in range(6)])

    result = run(rows, proposed, params, history)

    assert list(result.sampled) == plain[: len(result.sampled)]
    assert len(result.sampled) > next((i for i in range(5) if proposed[i] != plain[i].token_id), 5)


def test_a_verdict_says_how_likely_the_target_held_the_token():
    rows = random_rows(3, 2)
    expected = np.exp(rows[0].astype(np.float64)) / np.exp(rows[0].astype(np.float64)).sum()

    for token_id in range(VOCAB):
        (verdict,) = run(rows, [token_id]).by_draft[0]
        assert verdict.target_probability == pytest.approx(expected[token_id], rel=1e-5)
        assert (verdict.p, verdict.q, verdict.draw) == (None, None, None)
        (tried,) = run(rows, Proposal((token_id,), (certain(token_id),)), SamplingParams(temperature=1.0)).by_draft[0]
        assert tried.target_probability == pytest.approx(expected[token_id], rel=1e-5)


# Sampling


@pytest.mark.parametrize("seed", range(40))
def test_a_guess_without_odds_stands_where_plain_sampling_draws_it(seed):
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2)
    rows = np.repeat(random_rows(seed, 1), 4, axis=0)
    plain = one_by_one(lambda tokens: rows[0], params, [1, 2], seed, 4)
    proposed = [plain[0].token_id, plain[1].token_id, (plain[2].token_id + 1) % VOCAB]

    result = run(rows, proposed, params, [1, 2], seed)

    assert list(result.sampled) == plain[:3]
    assert [(verdict.p, verdict.q, verdict.draw) for verdict in result.by_draft[0]] == [(None, None, None)] * 3
    with_odds = Proposal(tuple(proposed), tuple(map(certain, proposed)))
    assert verify_drafts([rows], [with_odds], Draw(params, seed, 0, [1, 2])).sampled == result.sampled, "by default"


@pytest.mark.parametrize("seed", range(60))
def test_a_guess_with_odds_stands_if_its_draw_is_below_p_over_q(seed):
    params = SamplingParams(temperature=1.0, top_k=8)
    target, draft = random_rows(seed, 2)[0], random_rows(1000 + seed, 1)[0]
    p, q = distribution(target, params), distribution(draft, params)
    proposed = q.draw(DrawName(seed, 0, 2, Purpose.PROPOSE))
    draw = uniform(DrawName(seed, 0, 2, Purpose.ACCEPT))

    result = run(np.stack([target, target]), Proposal((proposed,), (q,)), params, seed=seed)

    (verdict,) = result.by_draft[0]
    assert (verdict.p, verdict.q, verdict.draw) == (p.probability(proposed), q.probability(proposed), draw)
    assert verdict.accepted == (draw < p.probability(proposed) / q.probability(proposed))
    if not verdict.accepted:
        replacement = tokens_of(result)[0]
        assert p.probability(replacement) > q.probability(replacement)
        assert replacement == residual(p, q).draw(DrawName(seed, 0, 2, Purpose.RESAMPLE))


def test_a_draft_like_the_target_is_always_accepted():
    params = SamplingParams(temperature=0.7, top_p=0.8)
    rows = random_rows(1, 4)
    odds = tuple(distribution(row, params) for row in rows[:3])
    for seed in range(200):
        proposed = tuple(q.draw(DrawName(seed, 0, 2 + i, Purpose.PROPOSE)) for i, q in enumerate(odds))
        assert run(rows, Proposal(proposed, odds), params, seed=seed).num_accepted == 3


def test_the_residual_is_the_positive_part_of_the_difference_normalized():
    thirds = [Distribution(np.arange(3), np.array(shares)) for shares in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5])]
    assert residual(*thirds).token_ids.tolist() == [0]
    rng = np.random.default_rng(0)
    for _ in range(300):
        ours, theirs = (np.sort(rng.choice(9, size=rng.integers(1, 9), replace=False)) for _ in range(2))
        p = Distribution(ours, rng.dirichlet(np.ones(len(ours))))
        q = Distribution(theirs, rng.dirichlet(np.ones(len(theirs))))
        dense = np.array([max(0.0, p.probability(i) - q.probability(i)) for i in range(9)])

        found = residual(p, q)

        assert found.probabilities.sum() == pytest.approx(1)
        assert (found.probabilities > 0).all()
        assert [found.probability(i) for i in range(9)] == pytest.approx(dense / dense.sum())


@pytest.mark.parametrize("nudge", [0.0, 1e-17, 1e-16, 2.3e-16, 1e-12])
def test_where_rounding_leaves_no_residual_the_targets_own_distribution_serves(nudge):
    p = distribution(random_rows(2, 1)[0], SamplingParams(temperature=1.0))
    q = Distribution(p.token_ids, p.probabilities + nudge)

    found = residual(p, q)

    assert found.probabilities.sum() == pytest.approx(1)
    assert np.isfinite(found.probabilities).all()
    assert set(found.token_ids) <= set(p.token_ids)


def test_a_draft_with_a_larger_vocabulary_has_odds_for_tokens_that_the_target_lacks():
    params = SamplingParams(temperature=1.0)
    q = Distribution(np.arange(2 * VOCAB), np.full(2 * VOCAB, 1 / (2 * VOCAB)))
    for seed in range(100):
        result = run(random_rows(seed, 2), Proposal((3,), (q,)), params, seed=seed)
        assert all(0 <= token_id < VOCAB for token_id in tokens_of(result))


# Several drafts


@pytest.mark.parametrize(
    ("runs", "emitted", "winner"),
    [
        ([[7, 8, 4], [7, 4, 4], [4]], (7, 8, 9), 0),
        ([[7, 4, 4], [4], [7, 8, 9]], (7, 8, 9, 3), 2),
        ([[7], [7, 8], [7, 8, 9]], (7, 8, 9, 3), 2),
        ([[7, 8], [7, 8, 4], []], (7, 8, 9), 0),
        ([[4], [5, 8], []], (7,), 0),
    ],
)
def test_of_several_drafts_the_one_that_is_accepted_longest_wins(runs, emitted, winner):
    truth = [7, 8, 9, 3]
    rows = [rows_saying(truth[: len(run) + 1]) for run in runs]

    proposals = [Proposal(tuple(run)) for run in runs]
    result = verify_drafts(rows, proposals, Draw(GREEDY, 5, 0, [1, 2]), wants_probabilities=False)

    assert (tokens_of(result), result.winner) == (emitted, winner)
    assert verify_argmax([row.argmax(1) for row in rows], [row.max(1) for row in rows], proposals) == result
    for run, verdicts in zip(runs, result.by_draft, strict=True):
        agreeing = next((i for i in range(len(run)) if run[i] != truth[i]), len(run))
        assert [verdict.accepted for verdict in verdicts] == [True] * agreeing + [False] * (agreeing < len(run))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_one_fork_of_several_is_what_it_is_alone_where_the_others_propose_nothing(params):
    for seed in range(50):
        rows, q = random_rows(seed, 3), distribution(random_rows(1000 + seed, 1)[0], SamplingParams(temperature=1.0))
        proposal = Proposal(tuple(q.draw(DrawName(1, 0, position, Purpose.PROPOSE)) for position in (2, 3)), (q, q))
        alone = verify(rows, proposal, Draw(params, seed, 0, [1, 2]))
        draw = Draw(params, seed, 0, [1, 2])
        beside = verify_drafts([rows, rows[:1]], [proposal, NO_PROPOSAL], draw, acceptance="rejection")

        assert beside.sampled == alone.sampled
        assert beside.by_draft == (alone.by_draft[0], ())


@pytest.mark.parametrize("is_certain", [False, True])
def test_under_sampling_each_draft_is_tried_against_what_those_before_left(is_certain):
    """is_certain: the second has no odds beside the first, which has."""
    params = SamplingParams(temperature=1.0)
    tried = set()
    for seed in range(400):
        target, first, second = random_rows(seed, 3)
        p, q1, q2 = (distribution(row, params) for row in (target, first, second))
        x1, x2 = (q.draw(DrawName(seed, 0, 2, Purpose.PROPOSE, branch)) for branch, q in enumerate((q1, q2)))
        rows = np.stack([target, target])
        if is_certain:
            q2 = certain(x2)
        result = verify_drafts(
            [rows, rows],
            [Proposal((x1,), (q1,)), Proposal((x2,), None if is_certain else (q2,))],
            Draw(params, seed, 0, [1, 2]),
            acceptance="rejection",
        )

        draws = [uniform(DrawName(seed, 0, 2, Purpose.ACCEPT, branch)) for branch in range(2)]
        left = residual(p, q1)
        if draws[0] * q1.probability(x1) < p.probability(x1):
            expected = x1
        elif draws[1] * q2.probability(x2) < left.probability(x2):
            expected = x2
            assert (result.by_draft[1][0].p, result.by_draft[1][0].draw) == (left.probability(x2), draws[1])
        else:
            expected = residual(left, q2).draw(DrawName(seed, 0, 2, Purpose.RESAMPLE))
        assert tokens_of(result)[0] == expected
        tried.add((x1 == expected, x2 == expected))
    assert tried == {(True, False), (False, True), (False, False), (True, True)}


def test_what_comes_after_an_accepted_draft_is_not_drawn_for_and_is_said_against_the_same_odds():
    params, target = SamplingParams(temperature=1.0), random_rows(4, 1)[0]
    p = distribution(target, params)
    x = int(p.token_ids[p.probabilities.argmax()])
    drafts = [Proposal((x,), (p,)), Proposal((x,), (certain(x),)), Proposal((x,), (p,))]
    result = verify_drafts([np.stack([target] * 2)] * 3, drafts, Draw(params, 3, 0, [1]), acceptance="rejection")
    assert [verdicts[0].draw is None for verdicts in result.by_draft] == [False, True, True]
    assert {verdicts[0].p for verdicts in result.by_draft} == {p.probability(x)}


@pytest.mark.parametrize("acceptance", ["gumbel", "rejection"])
def test_a_verdicts_argmax_is_that_after_bias_and_penalties_whatever_was_drawn(acceptance):
    params, said = SamplingParams(temperature=4.0, logit_bias={3: 5.0}), set()
    for seed in range(20):
        draw = Draw(params, seed, 0, [1])
        result = verify_drafts([rows_saying([7, 8])], [Proposal((7,), (certain(7),))], draw, acceptance=acceptance)
        assert [verdict.target_argmax for verdict in result.by_draft[0]] == [3]
        said.add(tokens_of(result)[0])
    assert len(said) > 2


# What is refused


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**6])
def test_a_token_outside_the_vocabulary_is_refused_and_cut_off_before(token_id):
    with pytest.raises(ValueError, match=f"proposed token {token_id} is outside the vocabulary of {VOCAB} tokens"):
        run(random_rows(0, 3), [1, token_id])

    with pytest.raises(ValueError, match=f"proposed token {token_id} is outside"):
        verify_drafts([random_rows(0, 2)] * 2, [Proposal((1,)), Proposal((token_id,))], Draw(GREEDY, 5, 0, [1]))
    odds = (certain(1), certain(token_id), certain(2))
    assert Proposal((1, token_id, 2), odds).cut(3, VOCAB) == Proposal((1,), odds[:1])
    assert Proposal((1, token_id, 2)).cut(3, VOCAB) == Proposal((1,))


def test_cutting_to_fewer_tokens_keeps_the_odds_of_those():
    odds = (certain(1), certain(2), certain(3))

    assert Proposal((1, 2, 3), odds).cut(2, VOCAB) == Proposal((1, 2), odds[:2])
    assert Proposal((1, 2, 3), odds).cut(9, VOCAB) == Proposal((1, 2, 3), odds)
    assert len(Proposal((1, 2, 3)).cut(0, VOCAB)) == 0


def test_a_token_that_its_distribution_cannot_draw_is_refused():
    with pytest.raises(ValueError, match="cannot have been drawn"):
        run(random_rows(0, 2), Proposal((1,), (certain(2),)), SamplingParams(temperature=1.0))


def test_each_proposed_token_has_a_distribution_or_none_has():
    with pytest.raises(ValueError, match="1 distributions for 2 tokens"):
        Proposal((1, 2), (certain(1),))


def test_rows_and_proposal_must_fit():
    with pytest.raises(ValueError, match="2 rows of logits for a proposal of 2 tokens"):
        run(random_rows(0, 2), [1, 2])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_that_are_no_numbers_are_refused_where_they_are_needed_and_the_tokens_before_stand(params, value, row):
    rows = rows_saying([7, 8, 9]) * 20  # so that sampling, too, takes the likeliest
    rows[row, 5] = value

    if row:
        found = run(rows, [7, 8], params)
        assert (tokens_of(found), found.num_accepted) == ((7, 8)[:row], row - 1)
    with pytest.raises(BrokenLogits):
        verify_argmax([[7]], [[value]], [NO_PROPOSAL])
    with pytest.raises(BrokenLogits):
        run(rows[row:], [7, 8][row:], params)
    rejected_first = run(rows, [6, 8], params) if row > 0 else None  # later rows follow a token that is not there
    assert rejected_first is None or tokens_of(rejected_first) == (7,)
