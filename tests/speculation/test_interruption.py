"""Ctrl-C anywhere in a step that guesses: what goes on afterwards goes on as if nothing had happened."""

from functools import partial

import numpy as np
import pytest

from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.run import Run
from forge.speculation.leases import lease_model
from tests.engine.scripted import assert_nothing_held, letters, muddled, new_engine
from tests.engine.test_interruption import interrupted_at, lines_of, results
from tests.slow import mostly_slow
from tests.speculation.proposers import scripted_draft, speculator, wrong_now_and_then

REQUESTS = {
    "ends first": ("ab", SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)),
    "drawn": ("hello", SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True)),
    "stops": ("abc", SamplingParams(max_tokens=12, ignore_eos=True, stop=["qa", "e"])),
}
STRIDE = 9
"""Every so many lines are tried: the seeds of the last test try others."""


def busy_engine(kv: str, several: bool, steps: int = 2) -> tuple[Engine, Run]:
    """Three requests that all speculate, `steps` steps done."""
    drafts = [
        scripted_draft(wrong_now_and_then(every=every), name=f"{every}") for every in ((3, 4) if several else (3,))
    ]
    engine = new_engine(muddled, kv=kv, max_num_seqs=4, speculation=speculator(*drafts, k=3), max_num_batched_tokens=64)
    names = [name for name in REQUESTS if not (several and name == "drawn")]
    ids = {name: engine.add_request(name, letters(REQUESTS[name][0]), REQUESTS[name][1]) for name in names}
    run = Run(engine, list(ids.items()))
    for _ in range(steps):
        engine.step()
    return engine, run


def uninterrupted(kv: str, several: bool) -> list:
    _, run = busy_engine(kv, several, 0)
    assert len(list(run)) > 3
    return results(run)


def assert_nothing_held_by_drafts(engine: Engine) -> None:
    assert_nothing_held(engine)
    assert engine.speculation._states == {}
    for proposer in engine.proposers:
        proposer.cache.check_invariants()
        assert proposer.cache.stats().used_blocks == 0


@pytest.mark.parametrize("kv", mostly_slow(["off", "basic", "paged", "prefix"], quick=["prefix"]))
@pytest.mark.parametrize("several", [False, True], ids=["one draft", "two drafts"])
def test_an_interrupted_cycle_can_be_gone_on_from_as_if_nothing_had_happened(kv, several):
    expected = uninterrupted(kv, several)
    engine, _ = busy_engine(kv, several)
    lines = lines_of(engine.step)
    for line in range(0, lines, STRIDE):
        engine, run = busy_engine(kv, several)
        assert interrupted_at(line, engine.step), f"line {line}"

        assert run.outputs  # recovers
        engine.scheduler.check_invariants()
        for _ in run:
            engine.scheduler.check_invariants()

        assert results(run) == expected, f"line {line}"
        assert_nothing_held_by_drafts(engine)


@pytest.mark.parametrize("kv", ["basic", "prefix"])
def test_an_interrupted_cycle_can_be_aborted(kv):
    lines = lines_of(busy_engine(kv, True)[0].step)
    for line in range(0, lines, 3 * STRIDE):
        engine, run = busy_engine(kv, True)
        assert interrupted_at(line, engine.step)

        run.abort()

        assert all(sample[2] in ("abort", "length", "stop") for sample in results(run))
        assert_nothing_held_by_drafts(engine)


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_interrupted_again_and_again_it_still_comes_to_the_same_end(kv):
    expected = uninterrupted(kv, False)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        engine, run = busy_engine(kv, False, 0)
        while engine.has_unfinished():
            while interrupted_at(int(rng.integers(6000)), engine.step) and engine.has_unfinished():
                recover = partial(engine.output, next(iter(engine._requests)))
                interrupted_at(int(rng.integers(600)), recover)
            assert run.outputs
            engine.scheduler.check_invariants()

        assert results(run) == expected, f"seed {seed}"
        assert_nothing_held_by_drafts(engine)


@pytest.mark.parametrize("who", mostly_slow(["draft", "target"], quick=["draft"]))
def test_a_revocation_may_be_interrupted_too(who):
    def revoke_and_step(engine: Engine) -> None:
        lease_model(engine if who == "target" else engine.proposers[0], who).revoke()
        engine.step()

    expected = uninterrupted("paged", False)
    lines = lines_of(partial(revoke_and_step, busy_engine("paged", False)[0]))
    for line in range(0, lines, 5):
        engine, run = busy_engine("paged", False)
        assert interrupted_at(line, partial(revoke_and_step, engine))
        if who == "target":
            lease_model(engine, who).revoke()
        for _ in run:
            engine.scheduler.check_invariants()

        for found, whole, name in zip(results(run), expected, REQUESTS, strict=True):
            if who == "target":
                assert found[0] == whole[0][: len(found[0])] or name == "drawn"
                assert found[2] in ("error", whole[2])
            elif name != "drawn":
                assert found == whole
        assert_nothing_held_by_drafts(engine)
