"""Who computes what several prompts begin with, and what is worth caching: against lists of keys."""

import random

import pytest

from forge.engine import prefix_planner
from forge.engine.prefix_planner import MAX_DEFERRALS, PrefixPlanner
from forge.engine.step_plan import PlanBuilder
from forge.reasons import Deferred
from tests.engine.schedules import sequence

SIZE = 4


@pytest.mark.parametrize("seed", range(4))
def test_worth_caching_is_what_another_that_waits_or_one_before_begins_with(seed, monkeypatch):
    monkeypatch.setattr(prefix_planner, "MAX_SEEN", 5)
    rng, planner, waiting, seen = random.Random(seed), PrefixPlanner(SIZE), [], []
    for number in range(300):
        action = rng.choice(["add", "remove", "remember", "clear"] if number % 9 == 0 else ["add", "remove", "add"])
        if action == "add":
            waiting.append(sequence(number, prefix_keys=tuple(rng.choices(range(12), k=rng.randrange(4)))))
            planner.add(waiting[-1])
        elif action == "clear":
            waiting.clear()
            planner.clear()
        elif waiting:
            one = rng.choice(waiting)
            if action == "remove":
                waiting.remove(one)
                planner.remove(one)
            else:
                planner.remember(one)
                seen = [*dict.fromkeys([*seen, *one.prefix_keys])][-5:]
        for one in waiting[:3]:
            keys = [key for other in waiting for key in other.prefix_keys]
            shared = [key in seen or keys.count(key) > 1 for key in one.prefix_keys]
            assert planner.num_worth_caching(one) == [*shared, False].index(False)


def test_the_first_to_claim_a_block_owns_it_and_those_that_would_compute_it_next_wait():
    planner, plan = PrefixPlanner(SIZE), PlanBuilder(9, 9)
    planner.claim(sequence(0, prefix_keys=(1, 2, 3, 4)), SIZE, plan)
    planner.claim(sequence(1, prefix_keys=(5, 2, 6, 7, 8)), 0, plan, 4)
    assert plan.prefix_owners == {2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1}

    waits = sequence(2, prefix_keys=(9, 2, 5, 3))
    cached = {SIZE * 1: Deferred(0, SIZE * 2), SIZE * 2: Deferred(1, SIZE), SIZE * 3 + 1: Deferred(0, SIZE)}
    for num_cached, deferral in ({0: None, SIZE * 4: None} | cached).items():
        assert planner.deferral(waits, num_cached, plan) == deferral
    waits.times_deferred = MAX_DEFERRALS - 1
    assert planner.deferral(waits, SIZE, plan)
    waits.times_deferred = MAX_DEFERRALS
    assert planner.deferral(waits, SIZE, plan) is None
