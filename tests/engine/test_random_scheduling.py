"""Thousands of random steps: arrivals, aborts, priorities, tiny pools; and every output as if it had run alone."""

from collections import Counter
from itertools import count

import pytest

from tests.engine.random_cases import Play, random_case, shortest_failure

STEPS = {"off": 2_000, "basic": 3_000, "paged": 8_000, "prefix": 8_000}
EVER = ("aborted", "interrupted", "MaxNumSeqs", "admitted new", "prefill_only")
WITH_CACHE = (*EVER, "accepted", "rejected", "chunk", "mixed", "NoBlocks", "NoBudget")
WITH_BLOCKS = (*WITH_CACHE, "recompute", "swap", "fallback", "gave way itself", "admitted recompute", "admitted swap")
WITH_SHARING = (*WITH_BLOCKS, "hit", "Deferred", "published")
HAPPENS = {"off": EVER, "basic": WITH_CACHE, "paged": WITH_BLOCKS, "prefix": WITH_SHARING}


@pytest.mark.parametrize("kv", STEPS)
def test_outputs_are_those_of_each_request_alone(kv):
    seen: Counter[str] = Counter()
    for seed in count():
        try:
            seen += Play(random_case(seed, kv)).run()
        except Exception:
            pytest.fail(f"seed {seed}, {kv}: {shortest_failure(random_case(seed, kv))}")
        if seen["steps"] >= STEPS[kv]:
            break

    assert all(seen[name] >= 5 for name in HAPPENS[kv]), f"of these too little was tried: {seen}"


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_outputs_are_those_of_each_request_alone_where_steps_are_planned_ahead(kv):
    seen: Counter[str] = Counter()
    for seed in count():
        try:
            seen += Play(random_case(seed, kv, runs_ahead=True)).run()
        except Exception:
            pytest.fail(f"seed {seed}, {kv}: {shortest_failure(random_case(seed, kv, runs_ahead=True))}")
        if seen["steps"] >= 3_000:
            break

    ahead = (
        () if kv == "off" else ("planned ahead", "chosen on the device", "discarded", "scheduled after looking ahead")
    )
    happens = [name for name in HAPPENS[kv] if name not in ("fallback", "gave way itself")]
    assert all(seen[name] >= 5 for name in (*ahead, *happens)), f"of these too little was tried: {seen}"
    assert kv != "off" or not seen["planned ahead"], "without a cache the next step is another"
