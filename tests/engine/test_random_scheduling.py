"""Random workloads: every kind of request under every option, and every answer as if its request had run alone."""

import os
import random
from collections import Counter
from itertools import count

import pytest

from tests.engine.random_cases import Play, random_case, shortest_failure

IS_FUZZ = os.environ.get("FORGE_HYPOTHESIS_PROFILE") == "fuzz"
STEPS = {"off": 500, "basic": 1_000, "paged": 1_800, "prefix": 1_800}
"""Of a run of `make test`; `make fuzz` takes forty times as many, from a random case on."""
KINDS = ("samples", "prefill_only", "task", "form", "filter", "continues", "handed over")
EVER = (*KINDS, "aborted", "interrupted", "MaxNumSeqs", "admitted new", "separate")
WITH_CACHE = (*EVER, "accepted", "rejected", "chunk", "task in chunks", "mixed", "NoBlocks", "NoBudget")
WITH_BLOCKS = (
    *(*WITH_CACHE, "recompute", "swap", "fallback", "gave way itself"),
    *("admitted recompute", "admitted swap", "admitted handoff"),
)
WITH_SHARING = (*WITH_BLOCKS, "hit", "Deferred", "published")
HAPPENS = {"off": EVER, "basic": WITH_CACHE, "paged": WITH_BLOCKS, "prefix": WITH_SHARING}
AHEAD = ("planned ahead", "chosen on the device", "discarded", "scheduled after looking ahead")


def play(kv: str, runs_ahead: bool) -> Counter[str]:
    """What happened, and how often. Fails with the shortest case that fails in the same way."""
    seen: Counter[str] = Counter()
    for seed in count(random.randrange(1 << 32) if IS_FUZZ else 0):
        try:
            seen += Play(random_case(seed, kv, runs_ahead)).run()
        except Exception:
            pytest.fail(f"seed {seed}, {kv}: {shortest_failure(random_case(seed, kv, runs_ahead))}")
        if seen["steps"] >= STEPS[kv] * (40 if IS_FUZZ else 1):
            return seen
    raise AssertionError("there is no last seed")


@pytest.mark.parametrize("kv", STEPS)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["", "planned ahead"])
def test_every_answer_is_that_of_its_request_alone(kv, runs_ahead):
    seen = play(kv, runs_ahead)

    happens = [name for name in HAPPENS[kv] if not runs_ahead or name not in ("fallback", "gave way itself")]
    happens += AHEAD if runs_ahead and kv != "off" else ()
    assert not [name for name in happens if not seen[name]], f"of these too little was tried: {seen}"
    assert kv != "off" or not seen["planned ahead"], "without a cache the next step is another"
