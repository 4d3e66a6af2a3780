"""Each bug is caught as it says, the engine is sound without it, and nothing of it is left behind."""

import inspect
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from forge.backends.reference import ReferenceOperations
from forge.book import bugs
from forge.book.bugs import BUGS, BugRequest, bugs_of, run_requests, run_with_and_without
from forge.book.given import Given
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.cli.chapters import with_given
from forge.cli.run_control import create_llm
from forge.engine import sampling
from forge.engine.sampler import Sampler
from forge.engine.sequence import Sequence
from forge.grammar.matcher import GrammarMatcher
from forge.speculation.speculator import Speculator

each_bug = pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)

FIRES = {
    "freed-block": "block 0 is in 1 tables and has 0 references",
    "decref-first": "is in 2 tables and has 1 references",
    "in-flight-hit": "is indexed while it is being written",
    "full-hit": "the cached length is past the next position",
    "stale-count": None,
    "query-start": None,
    "rollback": "the cached length is past the next position",
    "lease": None,
    "matcher-ahead": None,
    "mask-after": None,
}
"""What says so; None where no invariant sees the bug and only the tokens tell."""


def patched() -> dict:
    """Every attribute that a bug may replace, as it is now."""
    owners = (PagedKvCache, PrefixKvCache, Sampler, Sequence, ReferenceOperations, Speculator, GrammarMatcher, sampling)
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


@each_bug
def test_a_bug_is_caught_as_it_says_and_the_engine_is_sound_without_it(bug):
    before = patched()
    runs = run_with_and_without(bug, lambda: create_llm("tales", **bug.loading))
    assert patched() == before
    assert runs.sound.failure is None
    assert runs.caught_by == bug.caught_by
    if FIRES[bug.name] is None:
        assert runs.checked.failure is None and runs.different
    else:
        assert FIRES[bug.name] in runs.checked.failure
    assert runs.different or runs.unchecked.failure, "the bug changes nothing that a reader could see"


def test_every_chapter_that_has_bugs_offers_them_and_no_other(forge):
    assert {bug.chapter for bug in BUGS.values()} == {"paged", "prefix", "batching", "speculation", "constrained"}
    assert set(FIRES) == set(BUGS)
    found = forge("paged", "--bug", "rollback")
    assert found.status == 2 and f"there are {', '.join(bugs_of('paged'))}" in found.err


def test_a_bug_that_is_not_there_goes_unnoticed(model):
    llm = create_llm(model, device="reference", kv="paged", num_blocks=16)
    run = run_requests(llm, (BugRequest("Once", {"max_tokens": 3, "ignore_eos": True}),), checked=True)
    assert run.failure is None and run.steps == 3 and len(run.token_ids[0]) == 3


def test_the_command_shows_what_caught_a_bug(forge):
    found = forge("paged", "--bug", "decref-first")
    assert found.status == 0 and "✓ caught by an invariant, in step 2" in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    facts = json.loads(forge("paged", "--bug", "decref-first", "--json").out)
    assert facts["caught_by"] == "invariant" and facts["step"] == 2 and facts["sound"] and facts["different"] == 1


@pytest.mark.parametrize("words", [("--model", "/nonexistent"), ("--block-size", "8"), ("Once",)])
def test_an_option_that_a_bugs_runs_would_ignore_is_refused(forge, words):
    found = forge("paged", *words, "--bug", "freed-block")
    assert found.status == 2 and found.out == "" and "leave " in found.err and found.err.count("\n") == 1


def test_a_readers_options_reach_a_bugs_runs_only_where_these_take_them():
    given = Given({"model": "mine.gguf", "threads": "1", "prompt": "The fox"})
    assert with_given("forge paged --bug freed-block", given) == "forge paged --bug freed-block --threads 1"


def test_a_bug_that_nothing_catches_is_a_failure(forge, monkeypatch):
    monkeypatch.setattr(bugs, "BUGS", {"decref-first": replace(BUGS["decref-first"], switch=nullcontext)})
    found = forge("paged", "--bug", "decref-first")
    assert found.status == 1 and "✗ unnoticed" in found.out and "nothing to be seen" in found.out


def test_switches_do_nothing_until_they_are_entered():
    before = patched()
    managers = [bug.switch() for bug in BUGS.values()]
    assert patched() == before and all(not inspect.isfunction(manager) for manager in managers)
