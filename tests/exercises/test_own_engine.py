"""All passed parts in one engine: every function is called, and the tokens are those of forge's own."""

import os
import pickle
import subprocess
import sys

import pytest

from forge import LLM, SamplingParams
from forge.exercises import ENTRIES, find_entry, own_engine, session
from tests.cli.conftest import environment
from tests.cli.conftest import forge as forge  # a fixture
from tests.exercises.mistakes import right

PROMPTS = ["abc abc abc abc abc abc", "the owl and the hen", "abc abc abc abc ab"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which everything has passed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "exercises"
    path.mkdir()
    for entry in ENTRIES:
        (path / entry.file_name).write_text(right(entry.name), encoding="utf-8")
    session.save_builds(path, session.Builds(passed={entry.number for entry in ENTRIES}))
    return path


def _generated(sampled: bool, **options) -> list[tuple[int, ...]]:
    llm = LLM("hash", block_size=4, max_num_seqs=8, speculate="ngram", speculate_fixed=True, **options)
    temperature = 0.8 if sampled else 0.0
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=3, n=2)
    return [tuple(one.token_ids) for output in llm.generate(PROMPTS, params) for one in output.outputs]


@pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
def test_all_parts_at_once_say_what_forges_own_say(folder, kv):
    options = {"kv": kv, "max_model_len": 96} if kv == "basic" else {"kv": kv, "num_blocks": 20}
    expected = [_generated(sampled, **options) for sampled in (False, True)]
    with own_engine.all_parts(folder) as calls:
        assert [_generated(sampled, **options) for sampled in (False, True)] == expected
    parts = {"basic": ["contiguous_cache"], "paged": ["paged_cache", "preemption"], "prefix": ["prefix_index"]}[kv]
    for name in ("sampling", "scheduler", "ngram_proposer", *parts):
        assert all(calls[name].values()), calls[name]
    assert calls["verification"]["verify_greedy"] and calls["verification"]["kept_length"]
    assert _generated(False, **options) == expected[0]


def test_without_a_cache_forges_own_scheduler_decides(folder):
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = LLM("hash", kv="off").generate("abc", params)[0].outputs[0].token_ids
    with own_engine.all_parts(folder):
        assert LLM("hash", kv="off").generate("abc", params)[0].outputs[0].token_ids == expected


def test_generate_names_the_parts_and_compares_with_forges_own(folder):
    command = [sys.executable, "-m", "forge", "build", "engine", "generate", "-m", "hash", "abc abc abc", "20"]
    done = subprocess.run(command, env=environment(**os.environ), capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert words.startswith("your engine: sampling (1)") and "scheduler (7)" in words and "router" not in words
    assert "identical to forge's own: 20 tokens of 1 request" in words and "forge's own " in words


def test_a_wrong_part_is_seen_in_the_tokens(folder, capsys):
    path = folder / find_entry("sampling").file_name
    path.write_text(right("sampling").replace("int(np.argmax(logits))", "int(np.argmin(logits))"), encoding="utf-8")
    (folder / find_entry("ngram_proposer").file_name).unlink()
    with own_engine.all_parts(folder), own_engine.observed() as runs:
        LLM.from_engine_args(own_engine.EngineArgs("hash")).generate("abc", SamplingParams(max_tokens=8, temperature=0))
    assert not own_engine.print_beside_own(runs[0])
    assert "1 of 1 request differ" in capsys.readouterr().out


def test_an_answer_that_is_too_short_is_no_identical_one(folder, capsys):
    args = own_engine.EngineArgs("hash", kv="paged")
    with own_engine.all_parts(folder), own_engine.observed() as runs:
        LLM.from_engine_args(args).generate("abc", SamplingParams(max_tokens=8, temperature=0))
    (tokens,) = runs[0].tokens.values()
    assert len(tokens) == 8 and own_engine.print_beside_own(runs[0])
    del tokens[5:]
    assert not own_engine.print_beside_own(runs[0])
    runs[0].ended.clear()  # aborted: as far as it came it is the same
    assert own_engine.print_beside_own(runs[0])


def test_the_parts_reach_the_process_of_a_server(folder):
    kind = own_engine.Assembling("paged")
    kind.folder = str(folder)
    script = (
        "import pickle, sys; from forge import LLM; kind = pickle.loads(sys.stdin.buffer.read());"
        "llm = LLM('hash', kv=kind); print(type(llm.engine.cache).__name__, type(llm.engine.scheduler).__name__)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(**os.environ), input=pickle.dumps(kind), capture_output=True)
    assert done.stdout.split() == [b"MyPagedCache", b"MyScheduler"], done.stderr


def test_without_a_passed_part_there_is_no_engine(forge, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = forge("build", "engine", "generate", "--folder", str(tmp_path))
    assert found.status == 2 and "has passed yet" in found.err
    assert forge("build", "engine", "paint", "--folder", str(tmp_path)).status == 2


def test_options_that_were_given_stay(folder):
    entries = own_engine.engine_entries(folder)
    assert own_engine.with_defaults(entries, ["generate", "--kv", "basic"]).count("--kv") == 1
    added = own_engine.with_defaults(entries, ["generate"])
    assert added[1:] == ["--kv", "prefix", "--speculate", "ngram", "--device", "reference"]
