"""Peers as they are asked: programs in place of libraries, and what is said of those that are not there."""

import stat
import sys

import pytest

from forge.bench import forge_worker
from forge.bench.cases import WARM_ROUNDS
from forge.bench.forge_worker import ForgeWorker
from forge.bench.llama_binary_worker import PROGRAM, STEPS, LlamaBinaryWorker
from forge.bench.llama_cpp_worker import LlamaCppWorker
from forge.bench.openvino_worker import OpenVinoWorker
from forge.bench.worker import Missing, for_trial
from tests.small_models import write_small_qwen3

IK = "-rtr, --run-time-repack"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A `llama-batched-bench` that is slow unless it repacks, and writes down how it was called. Like that, it leaves a
    log where it runs, and that is not where its user works."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def written(usage: str):
        path = tmp_path / PROGRAM
        path.write_text(f"""#!/bin/sh
echo "log" > llama.log
case "$*" in --help) echo "{usage}"; exit;; esac
echo "$*" >> {tmp_path}/calls
case "$*" in *missing.gguf*) echo "unable to load model" >&2; exit 1;; *-rtr*) s=0.320;; *) s=0.640;; esac
echo "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
echo "|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|"
echo "|   112 |     32 |    4 |    576 |    0.900 |   100.00 |    0.900 |   100.00 |    1.000 |   100.00 |"
echo "|   112 |     32 |    4 |    576 |    0.500 |   100.00 |    $s |   100.00 |    1.000 |   100.00 |"
""")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    yield written
    assert not list(work.iterdir())


def loaded(folder, model: str = "model.gguf") -> LlamaBinaryWorker:
    worker = LlamaBinaryWorker()
    scratch = folder if folder.is_dir() else folder.parent
    worker.said = worker.load(model, threads=2, scratch=str(scratch), binary=str(folder))["description"]
    return worker


def test_a_programs_best_setting_is_taken_and_timed_by_its_own_table(program):
    folder = program(IK)
    worker = loaded(folder)
    assert worker.said.startswith("ik_llama.cpp: llama-batched-bench, 2 threads")
    assert worker.prepare("decode", 128, [[1] * 129] * 4) == {
        "setting": "flash attention, repacked", "seconds": 0.320 / STEPS,
    }  # fmt: skip
    assert worker.turn(5, 0.1) == {"seconds": [0.320 / STEPS], "top_tokens": []}
    last = (folder / "calls").read_text().split("\n")[-2]
    assert "-npp 112 -ntg 32 -npl 4 -c 768" in last and "-rtr" in last and "-t 2 -tb 2" in last
    worker.prepare("prefill", 0, [[1] * 512])
    assert worker.turn(1, 0.1)["seconds"] == [0.5]
    assert "-npp 512 -ntg 1 -npl 1,1" in (folder / "calls").read_text()


def test_settings_are_tried_with_fewer_tokens_than_a_long_case_has(program):
    folder = program(IK)
    worker = loaded(folder)

    def calls() -> list[str]:
        lines = (folder / "calls").read_text().splitlines()
        (folder / "calls").write_text("")
        return [line[line.index("-npp") : line.index(" -c")] for line in lines]

    calls()
    worker.prepare("decode", 32768, [[1] * 32769] * 2)
    worker.turn(1, 0.1)
    worker.prepare("prefill", 0, [[1] * 32768])
    worker.turn(1, 0.1)
    trials = ["-npp 4079 -ntg 32 -npl 2"] * 4, ["-npp 8192 -ntg 1 -npl 1,1"] * 4
    assert calls() == [*trials[0], "-npp 32752 -ntg 32 -npl 2", *trials[1], "-npp 32768 -ntg 1 -npl 1"]


@pytest.mark.parametrize(
    ("sequences", "context", "length", "shorter"),
    [(1, 128, 129, (128, 129)), (1, 0, 8192, (0, 8192)), (1, 0, 8193, (0, 8192)), (1, 32768, 32769, (8191, 8192)),
     (16, 1024, 1025, (511, 512))],
)  # fmt: skip
def test_a_case_is_shortened_to_so_many_tokens_of_all_sequences(sequences, context, length, shorter):
    left, token_ids = for_trial(context, [list(range(length)) for _ in range(sequences)])
    assert (left, len(token_ids[-1])) == shorter
    assert token_ids == [list(range(shorter[1]))] * sequences


@pytest.mark.parametrize(("worker", "set_up"), [(LlamaCppWorker, "_set_up"), (OpenVinoWorker, "_begin")])
@pytest.mark.parametrize(("kind", "context"), [("decode", 9000), ("prefill", 0)])
def test_a_library_tries_its_settings_with_a_shorter_case_and_then_computes_all_of_it(
    worker, set_up, kind, context, monkeypatch
):
    peer, lengths = worker(), []

    def record(*arguments):
        if worker is LlamaCppWorker:
            lengths.append((peer._past, len(peer._token_ids[0])))
        else:
            lengths.append((arguments[1], len(arguments[2][0])))

    monkeypatch.setattr(peer, set_up, record)
    monkeypatch.setattr(peer, "_step", lambda: 1.0)
    peer.prepare(kind, context, [[1] * 9001])
    short, whole = (max(0, context - 809), 8192), (context, 9001)
    assert lengths[:2] == [short, short]
    assert lengths[-1] == whole


def test_forge_warms_up_with_one_step_of_a_case_that_is_too_long_to_repeat(tmp_path, monkeypatch):
    worker, steps = ForgeWorker(), []
    worker.load(str(write_small_qwen3(tmp_path / "m.gguf")), device="cpu")
    monkeypatch.setattr(worker, "_step", lambda: steps.append(1) or 1.0)
    monkeypatch.setattr(forge_worker, "TRIAL_TOKENS", 16)
    worker.prepare("prefill", 0, [list(range(16))])
    assert len(steps) == WARM_ROUNDS
    worker.prepare("prefill", 0, [list(range(17))])
    assert len(steps) == WARM_ROUNDS + 1


def test_llama_cpps_own_program_is_said_to_be_that_and_is_not_told_to_repack(program):
    folder = program("usage")
    worker = loaded(folder / PROGRAM)
    assert worker.said.startswith("llama.cpp, not ik_llama.cpp")
    assert worker.prepare("decode", 128, [[1] * 129])["seconds"] == 0.640 / STEPS
    assert "-rtr" not in (folder / "calls").read_text()


def test_a_program_that_fails_says_why(program):
    with pytest.raises(RuntimeError, match="unable to load model"):
        loaded(program(IK), "missing.gguf")


@pytest.mark.parametrize("binary", [None, "no/such/folder"])
def test_without_the_program_it_is_said_what_to_build(binary):
    with pytest.raises(Missing, match=r"github.com/ikawrakow/ik_llama.cpp .* --peer-bin"):
        LlamaBinaryWorker().load("model.gguf", threads=2, scratch=".", binary=binary)


def test_without_openvino_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(Missing, match=r"pip install openvino-genai"):
        OpenVinoWorker().load("model.gguf", threads=2, scratch=str(tmp_path))


@pytest.mark.parametrize(("asked", "used"), [(None, "int8"), ("bfloat16", "bfloat16")])
def test_on_a_cpu_forge_is_measured_with_the_kv_dtype_that_users_get(tmp_path, asked, used):
    worker = ForgeWorker()
    loaded = worker.load(str(write_small_qwen3(tmp_path / "m.gguf")), device="cpu", kv_dtype=asked)

    prepared = worker.prepare("decode", 16, [list(range(17)), list(range(1, 18))])

    assert loaded["description"].endswith(f"KV {used}")
    assert prepared["setting"] == f"{used} KV"
    assert worker._storage.layout.kv_dtype == used
