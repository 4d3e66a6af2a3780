"""`forge bench oneshot`: judges beside generations, both classes in turns."""

import pytest

from forge.bench import kit, oneshot
from forge.llm import LLM


def test_capacity_is_the_median_of_turns_that_both_classes_take_alternately(monkeypatch):
    speeds = {"generation": [100.0, 50.0, 200.0], "prefill_only": [80.0, 50.0, 100.0]}
    p95 = {"generation": [30.0, 90.0, 10.0], "prefill_only": [3.0, 3.0, 5.0]}
    order: list[str] = []

    def beside(engine, *asked):
        name = "prefill_only" if engine.scheduler.config.prefill_only else "generation"
        turn = order.count(name)
        order.append(name)
        return speeds[name][turn], p95[name][turn], [(1,)]

    monkeypatch.setattr(oneshot, "_beside", beside)
    llm = LLM("hash", kv="paged")
    figures = oneshot._capacity(llm, kit.PromptMaker(llm), prompt_tokens=16, reps=3)

    assert [set(order[start : start + 2]) for start in (0, 2, 4)] == [set(speeds)] * 3
    assert (figures["generation_p95_ms"], figures["prefill_only_p95_ms"]) == (30, 3)
    assert figures["latency_ratio"] == pytest.approx(10), "the turns' ratios are 10, 30 and 2"
    assert figures["generation_tokens_per_second"] == 100 and figures["speed_ratio"] == pytest.approx(0.8)
