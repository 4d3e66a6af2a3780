"""When guessing pays: the formula, the estimate, and whole sequences simulated without a clock."""

from dataclasses import replace

import numpy as np
import pytest

from forge.speculation.controller import WINDOW, Costs, SpeculationControl, speed_up

CHEAP, DEAR = Costs(0.05, 0.05), Costs(0.3, 0.05)


def simulate(acceptance, costs: Costs, *, max_k=4, tokens=256, seed=0, fixed=False, believed: Costs | None = None):
    """One sequence: each guess is accepted with `acceptance(position)` once those before it were.

    Returns (how many times faster than plain decoding, the reasons of all decisions, the last control). `believed` are
    the costs that are taken for true until the first cycle has measured them.
    """
    rng = np.random.default_rng(seed)
    known = believed or costs
    control = SpeculationControl.begin(max_k, known, fixed=fixed)
    time, emitted, reasons, paused = 0.0, 0, [control.decision.reason], 0
    while emitted < tokens:
        if control.k == 0:
            time, emitted, paused = time + 1, emitted + 1, paused + 1
            if paused == control.decision.retry_in:
                control, paused = control.probing(known), 0
        else:
            known, k, accepted = costs, control.k, 0
            while accepted < k and rng.random() < acceptance(emitted + accepted):
                accepted += 1
            time += 1 + k * (costs.token + costs.row)
            emitted += accepted + 1
            control = control.after_cycle(k, accepted, known)
        reasons.append(control.decision.reason)
    return emitted / time, reasons, control


def always(rate: float):
    return lambda position: rate


# The formula


def test_the_formula():
    assert speed_up(0.95, 4, Costs(0.3)) == pytest.approx(4.8 / 2.2)
    assert speed_up(0.0, 4, Costs(0.3)) == pytest.approx(1 / 2.2)
    assert speed_up(1.0, 4, Costs(0.0)) == 5
    assert speed_up(0.5, 4, Costs(0.1, 0.05)) == pytest.approx(3 / 1.6)


def expected_accepted(acceptance: float, k: int) -> float:
    """Return how many of `k` draft tokens are accepted on average, each with `acceptance` once those before it were."""
    return sum(acceptance**place for place in range(1, k + 1))


def test_the_accept_rate_is_accepted_over_proposed_in_the_last_50_cycles():
    control = SpeculationControl.begin(4, CHEAP)
    assert control.decision.accept_rate is None
    for _ in range(WINDOW):
        control = control.after_cycle(2, 1, CHEAP)
    for _ in range(WINDOW // 2):
        control = control.after_cycle(4, 3, CHEAP)

    assert len(control.recent) == WINDOW
    assert control.decision.accept_rate == pytest.approx((1 + 3) / (2 + 4))


# Staying on, turning down, going off


@pytest.mark.parametrize("costs", [Costs(0.01), CHEAP, Costs(0.1, 0.05), DEAR, Costs(0.8, 0.1), Costs(1.0), Costs(3.0)])
@pytest.mark.parametrize("acceptance", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("max_k", [1, 4, 8])
def test_a_useless_draft_costs_at_most_5_percent_over_256_tokens(costs, acceptance, max_k):
    for seed in range(10):
        gained, reasons, _ = simulate(always(acceptance), costs, max_k=max_k, seed=seed)
        assert gained > 0.95, reasons


def test_a_useless_draft_that_was_believed_cheap_costs_at_most_5_percent():
    gained, reasons, _ = simulate(always(0.0), Costs(1.0, 0.1), believed=CHEAP)

    assert gained > 0.95, reasons
    assert reasons[:2] == ["wins", "cannot_win"]


@pytest.mark.parametrize("acceptance", [0.7, 0.85, 0.95, 1.0])
@pytest.mark.parametrize("costs", [Costs(0.01), CHEAP, DEAR])
def test_a_useful_draft_gains_what_the_best_number_of_guesses_would(acceptance, costs):
    best = max(speed_up(expected_accepted(acceptance, k) / k, k, costs) for k in range(1, 5))
    gained = [simulate(always(acceptance), costs, seed=seed)[0] for seed in range(40)]

    assert np.mean(gained) > 0.95 * best


def test_a_cheap_and_useful_draft_is_never_switched_off():
    for seed in range(20):
        _, reasons, _ = simulate(always(0.85), CHEAP, tokens=1_000, seed=seed)
        assert set(reasons) <= {"wins", "turned_down"}


def test_guesses_become_fewer_before_they_stop():
    control = SpeculationControl.begin(4, Costs(0.15, 0.05))
    ks = [control.k]
    while control.k:
        control = control.after_cycle(control.k, 0, Costs(0.15, 0.05))
        ks.append(control.k)
        assert (control.decision.reason == "turned_down") == (0 < control.k < 4)

    assert ks == sorted(ks, reverse=True)
    assert {1, 0} < set(ks)
    assert control.decision.reason == "loses"
    assert control.decision.speed_up < 1.05
    assert control.decision.accept_rate == 0


@pytest.mark.parametrize("token", [1.0, 1.2])
def test_where_not_even_perfect_guesses_pay_it_says_so_from_the_start(token):
    control = SpeculationControl.begin(4, Costs(token))

    assert (control.k, control.decision.reason) == (0, "cannot_win")
    assert control.decision.retry_in == 64
    assert SpeculationControl.begin(4, Costs(0.99)).decision.reason == "loses", "though perfect ones would"


# Trying again


def test_it_tries_again_with_one_guess_after_pauses_that_grow():
    control, plain, pauses = SpeculationControl.begin(4, DEAR), 0, []
    for _ in range(1_500):
        if control.k == 0:
            plain += 1
            control = control.probing(DEAR) if plain == control.decision.retry_in else control
        else:
            if control.decision.reason == "probes":
                assert control.k == 1
                pauses.append(plain)
            plain = 0
            control = control.after_cycle(control.k, 0, DEAR)

    assert pauses == [64, 192, 256, 256, 256, 256]


def test_after_a_pause_it_tries_one_draft_token():
    control = SpeculationControl.begin(4, Costs(1.2)).probing(Costs(1.2))

    assert (control.decision.reason, control.decision.retry_in, control.k) == ("probes", None, 1)


def test_an_accepted_probe_switches_it_on_again_and_a_rejected_one_does_not():
    off = SpeculationControl.begin(4, DEAR)
    while off.k:
        off = off.after_cycle(off.k, 0, DEAR)
    probing = off.probing(DEAR)

    accepted, rejected = probing.after_cycle(1, 1, DEAR), probing.after_cycle(1, 0, DEAR)

    assert (accepted.decision.reason, accepted.k > 0) == ("on_again", True)
    assert (rejected.decision.reason, rejected.k, rejected.decision.retry_in) == ("loses", 0, 192)


def test_a_draft_that_becomes_useful_is_used():
    late = [simulate(lambda position: 0.9 * (position > 256), CHEAP, tokens=1024, seed=seed)[0] for seed in range(10)]
    never = speed_up(0, 1, CHEAP)

    assert min(late) > 1.25 > never


def test_pauses_are_short_again_once_it_has_proven_itself():
    control = replace(SpeculationControl.begin(4, CHEAP), pause=256)
    for _ in range(16):
        assert control.pause == 256
        control = control.after_cycle(4, 4, CHEAP)

    assert control.pause == 64


def test_measured_costs_that_fall_bring_back_one_that_could_not_win():
    control = SpeculationControl.begin(4, Costs(1.2)).probing(Costs(1.2))

    control = control.after_cycle(1, 1, CHEAP)

    assert (control.decision.reason, control.k) == ("on_again", 4)


# As asked for


def test_fixed_keeps_on_whatever_happens():
    _, reasons, control = simulate(always(0.0), Costs(3.0), fixed=True, tokens=40)

    assert set(reasons) == {"fixed"}
    assert (control.k, control.decision.accept_rate) == (4, 0.0)
    assert control.decision.speed_up == pytest.approx(1 / 13, abs=0.01)


def test_the_next_decision_follows_from_the_history_and_the_costs_alone():
    def told(history):
        control = SpeculationControl.begin(4, DEAR)
        for accepted in history:
            control = control.after_cycle(control.k, min(accepted, control.k), DEAR) if control.k else control
        return control

    history = np.random.default_rng(0).integers(0, 3, size=30).tolist()

    assert told(history) == told(history)
    assert told(history) != told([4] * 30)
