"""`forge bench cpu`: the order of turns, what becomes of peers that fail, and one real run of a tiny model."""

import json
from dataclasses import replace

import pytest

from forge.bench import cpu, process
from forge.bench.cases import CASES, Limits, Needs
from forge.bench.cpu import PEERS, Effort, Plan, run
from forge.bench.kit import Figure, select, select_peers
from forge.bench.process import ProcessFailed
from forge.cli.main import main
from forge.errors import UsageError
from tests.bench.stubs import Script
from tests.model.raw_safetensors import write_folder
from tests.small_models import write_small_qwen3

LITTLE = Effort(repetitions=2, loads=1, decode_steps=1, turn_seconds=0.0, limit_seconds=0.01, array_bytes=1 << 22)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf", tensor_type="Q8_0"))


@pytest.fixture
def scripted(monkeypatch):
    """Runs a plan against scripted processes; the last result and the script."""

    def play(plan, **script):
        played = Script(**script)
        monkeypatch.setattr(process, "REST_SECONDS", 0)
        monkeypatch.setattr(process, "BenchProcess", played)
        *_, last = run(plan)
        assert played.open == 0, "a process was left running"
        return last, played

    return play


def plan(model, **changes) -> Plan:
    return replace(
        Plan(model, select("decode1", CASES), ("llama.cpp", "transformers"), threads=1, effort=LITTLE), **changes
    )


def measured(result, number: int = 0) -> dict:
    return {one["contender"]: one for one in result["figures"][number]["measured"]}


def names(result) -> list[str]:
    return [one["name"] for one in result["contenders"]]


def test_processes_take_turns(scripted, model):
    seconds = {"forge": [1.0, 2.0], "llama.cpp": [2.0, 6.0], "transformers": [4.0, 8.0]}
    result, script = scripted(plan(model), seconds=seconds)
    turns = [name for name, do in script.log if do == "turn"]
    assert turns == ["forge", "llama.cpp", "transformers"] * 2
    assert measured(result)["llama.cpp"]["forge_is_times_as_fast"] == Figure(2.5, 2.0, 3.0, 2)
    assert names(result) == ["forge", "llama.cpp", "transformers"]


def test_another_likeliest_token_is_counted_and_a_program_that_shows_none_agrees_with_nothing():
    tokens = {"forge": [1, 2, 3], "llama.cpp": [1, 9, 9], "ik_llama.cpp": []}
    turns = {name: {"setting": "", "seconds": [1.0], "top_tokens": shown} for name, shown in tokens.items()}
    (case,) = select("decode4", CASES)
    entry = cpu.figure(case, Needs(1, 1), turns, Limits(1.0, 1.0))
    disagreements = {one["contender"]: one["top_token_disagreements"] for one in entry["measured"]}
    assert disagreements == {"forge": None, "llama.cpp": 2, "ik_llama.cpp": None}


def test_the_machine_is_measured_before_and_after(scripted, model):
    result, script = scripted(plan(model, peers=()), seconds={"forge": [1.0, 1.0]})
    assert script.log[0][1] == script.log[-1][1] == "measure_cpu"
    assert result["limits"]["before"] and result["limits"]["after"]


def test_logits_are_held_against_float32(scripted, model):
    result, script = scripted(plan(model, peers=()), seconds={"forge": [1.0, 1.0]})
    assert script.log.count(("float32", "logits")) == script.log.count(("forge", "logits")) == 2
    assert result["contenders"][0]["logits_error"] == 0.5


def test_a_folder_is_as_large_as_its_weights_and_not_held_against_float32_if_that_is_too_much(
    scripted, tmp_path, monkeypatch
):
    monkeypatch.setattr(cpu, "EXACT_BYTES", tmp_path.stat().st_size + 1)
    folder = str(write_folder(tmp_path))
    result, script = scripted(plan(folder, peers=()), seconds={"forge": [1.0, 1.0]})
    assert result["model_size"].file_bytes > cpu.EXACT_BYTES and ("float32", "logits") not in script.log


def test_loading_is_repeated_in_new_processes(scripted, model):
    effort = replace(LITTLE, loads=3)
    result, script = scripted(plan(model, peers=("llama.cpp",), effort=effort), seconds={
        "forge": [1.0, 1.0], "llama.cpp": [1.0, 1.0],
    })  # fmt: skip
    loaded = [name for name, do in script.log if do == "load"]
    assert loaded == ["forge", "llama.cpp"] * 3 + ["float32"]
    assert [len(one["load_seconds"]) for one in result["contenders"]] == [3, 3]


def test_a_peer_that_is_missing_is_left_out_with_its_reason(scripted, model):
    seconds = {"forge": [1.0, 1.0], "transformers": [1.0, 1.0]}
    result, _ = scripted(plan(model), seconds=seconds, missing=("llama.cpp",))
    assert result["skipped"] == [{"name": "llama.cpp", "reason": "llama.cpp is not importable"}]
    assert names(result) == ["forge", "transformers"]


def test_a_peer_that_breaks_is_left_out_from_there_on(scripted, model):
    seconds = {"forge": [1.0] * 4, "transformers": [1.0] * 4}
    cases = select("decode1,prefill128", CASES)
    result, script = scripted(plan(model, cases=cases), seconds=seconds, failing=("llama.cpp",))
    assert script.log.count(("llama.cpp", "turn")) == 1
    assert [one["reason"] for one in result["skipped"]] == ["llama.cpp: broke"]
    assert not any("llama.cpp" in measured(result, number) for number in (0, 1))


def test_a_process_that_takes_too_long_takes_fewer_turns(scripted, monkeypatch, model):
    monkeypatch.setattr(process, "PATIENCE_SECONDS", -1.0)
    result, _ = scripted(plan(model, peers=()), seconds={"forge": [1.0, 1.0]})
    assert measured(result)["forge"]["seconds"] == [1.0]


def test_forge_failing_is_an_error_and_leaves_nothing_running(monkeypatch, model):
    script = Script({}, failing=("forge",))
    monkeypatch.setattr(process, "BenchProcess", script)
    with pytest.raises(ProcessFailed, match="forge: broke"):
        list(run(plan(model, peers=())))
    assert script.open == 0


def test_giving_up_in_the_middle_leaves_nothing_running(monkeypatch, model):
    script = Script({"forge": [1.0] * 9})
    monkeypatch.setattr(process, "BenchProcess", script)
    measuring = run(plan(model, peers=()))
    next(measuring)
    measuring.close()
    assert script.open == 0


def test_a_context_that_the_model_has_not_is_said(scripted, tmp_path):
    short = str(write_small_qwen3(tmp_path / "short.gguf", max_position_embeddings=256))
    cases = select("decode1,decode1@1024", CASES)
    result, _ = scripted(plan(short, cases=cases, peers=()), seconds={"forge": [1.0, 1.0]})
    assert [one["name"] for one in result["skipped"]] == ["decode 1 @ 1,024"]
    assert [figure["case"].name for figure in result["figures"]] == ["decode1"]


def test_peers_are_selected_by_name():
    assert select_peers(None, PEERS) == select_peers(["all"], PEERS) == tuple(PEERS)
    assert select_peers(["none"], PEERS) == ()
    assert select_peers(["transformers", "llama.cpp"], PEERS) == ("llama.cpp", "transformers")
    with pytest.raises(UsageError, match=r"unknown peer 'vllm'; there are llama\.cpp"):
        select_peers(["vllm"], PEERS)


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 0},
        {"effort": replace(LITTLE, repetitions=0)},
        {"cases": ()},
        {"peer_python": "no/such/python"},
        {"peer_bin": "no/such/bin"},
    ],
)
def test_a_plan_without_sense_is_refused(model, changes):
    with pytest.raises(UsageError):
        plan(model, **changes)


@pytest.fixture
def without_llama_cpp(monkeypatch, tmp_path):
    """Bench processes find a llama_cpp that cannot be imported."""
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_real_run_of_a_tiny_model(monkeypatch, without_llama_cpp, model, capsys):
    monkeypatch.setattr(cpu, "QUICK", LITTLE)
    arguments = ["-m", model, "--quick", "--threads", "1", "--only", "decode4,prefill128", "--peer", "llama.cpp"]
    assert main(["bench", "cpu", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["contenders"]] == ["forge"]
    assert len(found["skipped"]) == 1 and "not on this machine" in found["skipped"][0]["reason"]
    for figure in found["figures"]:
        (forge,) = figure["measured"]
        assert len(forge["seconds"]) == 2 and all(seconds > 0 for seconds in forge["seconds"])
    assert found["limits"]["used"]["bytes_per_second"] > 0 and found["contenders"][0]["peak_bytes"] > 0


def test_a_model_that_does_not_exist_is_refused_at_once(capsys):
    assert main(["bench", "cpu", "-m", "no-such.gguf"]) == 2
    assert "no such file" in capsys.readouterr().err
