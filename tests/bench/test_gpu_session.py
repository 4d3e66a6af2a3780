"""A session keeps every figure that it has, whatever becomes of a stage."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from forge.bench import gpu_session
from forge.bench.gpu_session import STAGES, Session, Stage, chosen_stages, main
from forge.errors import UsageError
from tests.backends.cpu.models import ROOT, run_python


def stage(name: str, seconds: float = 60) -> Stage:
    return Stage(name, "a stub", seconds, f"tests.bench.gpu_stub_stages:{name}")


def run(out, *stages: Stage, budget: float = 300, said: list[str] | None = None) -> dict:
    Session(out, budget, say=(said if said is not None else []).append).run(stages)
    return results(out)


def results(out) -> dict:
    return json.loads((out / "session.json").read_text())["stages"]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    for _ in range(600):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_figures_output_and_status_are_kept(tmp_path):
    said = []

    found = run(tmp_path, stage("works"), said=said)["works"]

    assert found["status"] == "done" and found["figures"] == {"first": 1.5, "second": {"ms": [1, 2]}}
    assert "said by a stage" in (tmp_path / "log.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "session.json"]
    assert "  first: 1.5" in said


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fails", "failed", "RuntimeError: CUDA error: an illegal memory access"),
        ("is_killed", "killed", "last words (exit status -9)"),
        ("skips", "skipped", "needs fastapi"),
    ],
)
def test_a_stage_that_ends_badly_costs_itself_alone(name, status, reason, tmp_path):
    found = run(tmp_path, stage(name), stage("works"))

    assert (found[name]["status"], found[name]["reason"]) == (status, reason)
    assert found[name]["figures"] == ({} if name == "skips" else {"before": 1})
    assert found["works"]["status"] == "done"
    if name == "fails":
        assert "in fails\n" in (tmp_path / "log.txt").read_text(), "the traceback"


def test_a_stage_that_hangs_leaves_its_stacks_and_ends_at_its_deadline(tmp_path, monkeypatch):
    found = run(tmp_path, stage("hangs", seconds=4), stage("works"))

    assert found["hangs"]["status"] == "deadline" and found["hangs"]["figures"] == {"before": 1}
    assert 'gpu_stub_stages.py", line' in (tmp_path / "log.txt").read_text()
    assert found["works"]["status"] == "done"


@pytest.mark.parametrize(("name", "status"), [("hangs_deaf", "deadline"), ("leaves_a_process_behind", "done")])
def test_what_a_stage_started_ends_with_it(name, status, tmp_path):
    found = run(tmp_path, stage(name, seconds=4))[name]

    assert found["status"] == status
    assert ends(found["figures"]["own process"])


def test_a_stage_killed_in_the_middle_of_a_figure_keeps_the_whole_ones(tmp_path):
    for _ in range(5):
        found = run(tmp_path, stage("is_killed_at_random"))["is_killed_at_random"]
        assert found["status"] == "killed"
        assert found["figures"] == {f"figure {number}": number for number in range(len(found["figures"]))}


def test_a_part_that_fails_costs_itself_alone(tmp_path):
    found = run(tmp_path, stage("fails_in_part"))["fails_in_part"]

    assert found["status"] == "done"
    assert found["figures"] == {"broken": {"failed": "ValueError: no such tile"}, "whole": 2}
    assert "in fails_in_part" in (tmp_path / "log.txt").read_text()


def test_much_output_is_cut_in_its_middle(tmp_path):
    run(tmp_path, stage("talks_much"), stage("works"))

    log = (tmp_path / "log.txt").read_text()
    assert len(log) < 1 << 20 and "bytes left out" in log and "the end" in log and "said by a stage" in log


def test_stages_that_the_budget_has_no_time_for_are_named(tmp_path):
    said = []

    found = run(tmp_path, stage("hangs"), stage("works"), budget=6, said=said)

    assert found["hangs"]["status"] == "deadline" and found["works"]["status"] == "not started"
    assert said[-1] == "to continue: --stages hangs,works"


def test_a_second_session_adds_to_the_first(tmp_path):
    run(tmp_path, stage("works"), stage("fails"))
    again = run(tmp_path, stage("fails_in_part"))

    assert again["works"]["figures"]["first"] == 1.5 and again["fails_in_part"]["status"] == "done"
    (tmp_path / "session.json").write_text("not json")
    assert list(run(tmp_path, stage("works"))) == ["works"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_that_is_killed_leaves_its_figures_and_no_process(number, tmp_path):
    code = (
        "from pathlib import Path; from forge.bench import gpu_session as g;"
        "from tests.bench.test_gpu_session import stage;"
        "g.STAGES = (stage('works'), stage('hangs_deaf'));"
        f"g.main(['--out', {str(tmp_path)!r}])"
    )
    session = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            path = tmp_path / "session.json"
            if path.exists() and "own process" in path.read_text():
                break
            time.sleep(0.05)
        os.kill(session.pid, number)
        session.wait(60)
    finally:
        session.kill()

    found = results(tmp_path)
    assert found["works"]["status"] == "done"
    assert found["hangs_deaf"]["status"] == ("interrupted" if number == signal.SIGTERM else "running")
    if number == signal.SIGTERM:
        assert ends(found["hangs_deaf"]["figures"]["own process"])


def test_unknown_stages_and_budgets_are_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(UsageError, match="--stages chips: unknown; there are machine"):
        chosen_stages("machine,chips")
    assert main(["--out", str(tmp_path / "x"), "--budget", "1"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert [each.name for each in chosen_stages("steps,machine")] == ["machine", "steps"]


def test_every_stage_exists():
    from forge.bench import gpu_stages

    assert all(callable(getattr(gpu_stages, each.name)) for each in STAGES)
    assert gpu_session.STAGES[0].name == "machine"


def test_the_session_itself_needs_the_standard_library_alone():
    found = run_python(["tests/bench/only_torch.py", "forge.bench.gpu_session"], PYTHONPATH=str(ROOT))

    assert found.stdout.splitlines() == ["[]", "refused []"], found.stderr


@pytest.mark.skipif(not (find_spec("torch") and find_spec("triton")), reason="needs torch and triton")
def test_the_core_path_needs_numpy_torch_and_triton_alone():
    found = run_python(["tests/bench/only_torch.py", "generate"], PYTHONPATH=str(ROOT))

    assert found.stdout.splitlines() == ["refused []"], found.stderr


def test_the_first_stage_names_what_is_missing(tmp_path):
    pytest.importorskip("torch")
    Session(tmp_path, 120, rehearsal=True, say=lambda text: None).run(chosen_stages("machine"))

    found = results(tmp_path)["machine"]
    assert found["status"] == "done" and "torch" in found["figures"]["versions"]
    assert "vllm" in found["figures"]["missing packages"]["peers"] or find_spec("vllm")


def test_writing_stacks_may_crash_a_stage_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "STACKS_BEFORE_END", 50.0)
    found = run(tmp_path, stage("is_killed", seconds=50))

    assert found["is_killed"]["status"] == "deadline"
