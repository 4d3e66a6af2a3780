"""No page says what the reader's own options, another model or a busy machine make untrue (`tests.book.claims`).

Of each chapter a few readings, the same in every run; where slow tests run, every one, as a table.
"""

import random
import time

import pytest

from tests.book import claims
from tests.book.claims import HASH, OPTIONS, Case, busy_machine, cases, fits, ill_formed, read
from tests.small_models import write_small_qwen3

SAMPLE = 1
LONG = ("cluster", "oneshot", "serving")
"""Chapters of which a reading takes long."""
PINNED = (
    Case("batching", "--requests 1", HASH, None),
    Case("speculation", "--temperature 0.9", HASH, None),
    Case("speculation", "--model hash --draft hash:0.5", HASH, 0),
    Case("constrained", "--choice a --choice b", HASH, None),
    Case("kernels", "--type Q4_K_M", claims.SYNTHETIC, 1),
)
"""Readings in which the book once accused forge of a bug, or a chapter stopped."""


def sample(chapter: str) -> list[Case]:
    """A few of a chapter's readings with models that run at once."""
    models = (HASH,) if chapter in LONG else (HASH, claims.SYNTHETIC)
    return random.Random(chapter).sample([case for case in cases(chapter) if case.model in models], SAMPLE)


READINGS = [
    *PINNED,
    *(
        pytest.param(case, marks=[pytest.mark.slow] * (chapter in LONG))
        for chapter in OPTIONS
        for case in sample(chapter)
    ),
]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return write_small_qwen3(
        tmp_path_factory.mktemp("models") / "synthetic.gguf", max_position_embeddings=claims.CONTEXT
    )


@pytest.fixture(autouse=True)
def short(request, monkeypatch):
    """Ray Serve takes half a minute to start, and tests/cluster kill engines; here the chapter finds none."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("forge.experiments.cluster.failure.find_spec", lambda name: None)
    with claims.short_measurements():
        yield


@pytest.mark.parametrize("case", READINGS, ids=str)
def test_no_claim_is_wrong_whatever_the_options_the_model_and_the_machine(case, synthetic):
    if not fits(case.chapter, case.options, case.model):
        pytest.skip("these options do not go with this model")
    result = read(case, synthetic)
    assert result.wrong == () and result.held + result.unclaimed > 0


@pytest.mark.slow
def test_no_claim_is_wrong_in_any_reading_of_any_chapter():
    assert claims.print_table([]) == 0


def test_a_wrong_claim_is_found(synthetic, monkeypatch):
    monkeypatch.setattr("forge.experiments.naive.distinct_tokens", lambda result: 1)
    monkeypatch.setattr("forge.views.summary.RunResult.tokens_computed", 1)
    (wrong, *_) = read(Case("naive", "Once 3", HASH, None), synthetic).wrong
    assert wrong.startswith("exit status 1")


def test_a_busy_machine_is_the_same_for_the_same_seed_and_its_clock_never_goes_back(monkeypatch):
    lost = []
    monkeypatch.setattr(claims, "_real_clock", lambda: 1.0)  # an idle machine that stands still
    for _ in range(2):
        with busy_machine(4):
            looks = [time.perf_counter() for _ in range(2000)]
            assert looks == sorted(looks)
            lost.append(looks[-1] - looks[0])
    assert lost[0] == lost[1] > 0.5


def test_a_text_that_is_not_well_formed_is_noticed():
    assert not ill_formed("It took 4.0 ms, 1 step and 1.1 times as long. So (it is).")
    assert ill_formed("It took – ms.") and ill_formed("It took 1 steps.") and ill_formed("It is is so.")
    assert ill_formed("it is.") and ill_formed("It is") and ill_formed("It is..")
