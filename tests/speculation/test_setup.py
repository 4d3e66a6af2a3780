"""From options to proposers: which are loaded, on what, and what they are taken to cost. Files stand for models."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from forge.errors import UsageError
from forge.speculation import setup
from forge.speculation.controller import Costs
from forge.speculation.lookup import ForcedProposer, NgramProposer
from forge.speculation.setup import Target, checked_acceptance, checked_mode, load_proposers

CHEAP = Costs(0.01, 0.1)


@pytest.fixture
def made(monkeypatch) -> dict[str, Any]:
    """What was called to load drafts. Every tokenizer that is no tuple is another one."""
    made: dict[str, Any] = {"backends": [], "model": Mock(), "proposer": Mock()}

    def check(target, draft, hint="") -> None:
        assert target == "tokenizer"
        if not isinstance(draft, tuple):
            raise UsageError(f"another tokenizer{hint}")

    def proposer(model, **options) -> SimpleNamespace:
        made["proposer"](model, **options)
        return SimpleNamespace(name=options["name"], storage=SimpleNamespace(layout="layout"))

    def weights(path: Path):
        return nullcontext(SimpleNamespace(tokenizer_spec=lambda: () if "other" not in path.name else "other"))

    def load_model(name, backend):
        made["backends"].append(backend())
        return SimpleNamespace(model=made["model"], tokenizer=() if name != "hash:other" else "other")

    monkeypatch.setattr(setup, "create_backend", lambda *options: options)
    monkeypatch.setattr(setup, "open_weights", weights)
    monkeypatch.setattr(setup, "Tokenizer", lambda spec: spec)
    monkeypatch.setattr(setup, "load_model", load_model)
    monkeypatch.setattr(setup, "load_qwen3", lambda _, backend: (made["backends"].append(backend), made["model"])[1])
    monkeypatch.setattr(setup, "check_same_tokenizer", check)
    monkeypatch.setattr(setup, "DraftProposer", proposer)
    monkeypatch.setattr(setup, "_SMALL_DRAFT_BYTES", 50)
    return made


@pytest.fixture
def target(tmp_path) -> Target:
    """A target of 200 bytes in a folder."""
    folder = tmp_path / "target"
    (folder / "inner").mkdir(parents=True)
    for name in ("first", "second"):
        (folder / name).write_bytes(bytes(100))
    tokenizer: Any = "tokenizer"
    return Target(tokenizer, 40, folder, 32, 3, "cpu", 7, "int8")


def file(folder: Path, name: str, size: int) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    return path


def test_a_mode_is_a_known_one_and_k_a_number():
    proposer = NgramProposer()
    for mode in ("off", "draft", "ngram", "grammar", proposer):
        assert checked_mode(mode, 1) is checked_mode(mode, 64) is mode
    assert checked_mode(None, 4) == "off"
    for mode, k, message in ((proposer, 65, "got 65"), ("off", 0, "got 0"), ("off", True, "got True"), ("x", 1, "'x'")):
        with pytest.raises(UsageError, match=message):
            checked_mode(mode, k)
    with pytest.raises(UsageError, match=r"1 to 64, got 2\.0"):
        checked_mode("off", 2.0)
    assert [checked_acceptance(rule) for rule in setup.ACCEPTANCE_RULES] == ["gumbel", "rejection"]
    with pytest.raises(UsageError, match="unknown --acceptance 'typical'; supported: gumbel, rejection"):
        checked_acceptance("typical")


def test_without_a_model_a_draft_token_costs_a_lookup(target):
    own = NgramProposer()
    assert load_proposers("off", ["x"], target) == [] and load_proposers(own, [], target) == [(own, CHEAP)]
    for mode, kind in (("ngram", NgramProposer), ("grammar", ForcedProposer)):
        ((proposer, costs),) = load_proposers(mode, [], target)
        assert type(proposer) is kind and costs == CHEAP


def test_a_file_costs_what_it_has_to_read_and_a_small_one_runs_on_one_thread(made, target, tmp_path):
    drafts = [file(tmp_path, "a.gguf", 50), file(tmp_path, "b.gguf", 49), tmp_path / "a.gguf", file(tmp_path, "c", 0)]
    found = load_proposers("draft", [*drafts, tmp_path / "a.gguf"], target)
    assert [proposer.name for proposer, _ in found] == ["a", "b", "a #2", "c", "a #3"]
    assert [costs.token for _, costs in found] == [50 / 200, 49 / 200, 50 / 200, 1 / 200, 50 / 200]
    assert {costs.row for _, costs in found} == {0.1}
    assert made["backends"] == [("cpu", 7), ("cpu", 1), ("cpu", 7), ("cpu", 1), ("cpu", 7)]
    limits = {"vocab_size": 40, "max_num_seqs": 3, "max_model_len": 32, "kv_dtype": "int8"}
    made["proposer"].assert_called_with(made["model"], **limits, name="a #3")
    made["model"].prepare.assert_called_with("layout")

    ((_, costs),) = load_proposers("draft", drafts[1:2], replace(target, path=None, draft_device="cuda"))
    assert (costs, made["backends"][-1]) == (CHEAP, ("cuda", 7))


def test_a_draft_for_the_hash_model_costs_as_much_as_it(made, target):
    for path, costs in ((None, Costs(1.0, 0.1)), (target.path, CHEAP)):
        made["backends"].clear()
        found = load_proposers("draft", ["hash:1", "hash:1"], replace(target, path=path))
        assert [(proposer.name, cost) for proposer, cost in found] == [("hash:1", costs), ("hash:1 #2", costs)]
        assert made["backends"] == [("cpu", 7)] * 2


def test_a_draft_with_other_tokens_is_refused_and_the_default_one_with_a_hint(made, target, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "DEFAULT_DRAFT", file(tmp_path, "other.gguf", 9))
    for drafts, message in (([setup.DEFAULT_DRAFT], "another tokenizer$"), ([], "tokenizer; give one .*ngram$")):
        with pytest.raises(UsageError, match=message):
            load_proposers("draft", drafts, target)
    with pytest.raises(UsageError, match="another tokenizer"):
        load_proposers("draft", ["hash:other"], target)


def test_there_are_as_many_drafts_as_can_be_told_apart(made, target, monkeypatch):
    monkeypatch.setattr(setup, "MAX_BRANCHES", 2)
    assert len(load_proposers("draft", ["hash:1"] * 2, target)) == 2
    with pytest.raises(UsageError, match="--draft is given 3 times, and 2 drafts at most"):
        load_proposers("draft", ["hash:1"] * 3, target)


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_a_cache_that_does_not_fit_is_refused_by_the_drafts_name(error, made, target):
    made["proposer"].side_effect = error
    with pytest.raises(UsageError, match="the KV cache of the draft hash:1 does not fit in memory"):
        load_proposers("draft", ["hash:1"], target)
