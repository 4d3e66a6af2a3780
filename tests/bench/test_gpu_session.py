"""A session keeps every figure that it has, whatever becomes of a stage."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from importlib.util import find_spec

import pytest

from forge.bench import gpu_session
from forge.bench.gpu_session import STAGES, Session, Stage, chosen_stages, main
from forge.errors import UsageError
from tests.backends.cpu.models import ROOT, run_python
from tests.bench.bare_machine import bare_environment, refused_packages


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


def test_whatever_becomes_of_the_stages_every_whole_figure_is_kept(tmp_path):
    """Random stages, some of them killed from outside at any moment, in several sessions that continue each other."""
    rng = random.Random(5)
    ends = {"works": "done", "fails": "failed", "is_killed": "killed", "skips": "skipped", "fails_in_part": "done"}
    ends |= {"is_killed_at_random": "killed", "counts_until_killed": "killed"}
    expected = {}
    for _ in range(3):
        names = rng.sample(sorted(ends), 4)
        session = Session(tmp_path, 300, say=lambda text: _kill_counting(text, rng))
        session.run([stage(name) for name in names])
        expected |= {name: ends[name] for name in names}
        found = results(tmp_path)
        assert {name: each["status"] for name, each in found.items()} == expected
        for name in ("is_killed_at_random", "counts_until_killed"):
            figures = found.get(name, {"figures": {}})["figures"]
            numbers = [value for title, value in figures.items() if title.startswith("figure")]
            assert numbers == list(range(len(numbers)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "session.json"]


def _kill_counting(text: str, rng: random.Random) -> None:
    """Ends a stage that counts once it has said who it is, after a while."""
    if text.startswith("  own process: "):
        timer = threading.Timer(rng.random() / 5, os.kill, (int(text.rpartition(" ")[2]), signal.SIGKILL))
        timer.start()


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_gets_more_than_its_deadline_and_all_together_no_more_than_the_budget(seed, tmp_path, monkeypatch):
    """By a clock of its own: stages end early, in time, or are ended."""
    rng, now, given = random.Random(seed), [1000.0], []

    def supervise(self, each: Stage, seconds: float) -> dict[str, str]:
        given.append((each, seconds))
        now[0] += seconds if rng.random() < 0.3 else rng.uniform(0, seconds)
        return {"status": "done"}

    monkeypatch.setattr(gpu_session.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Session, "_supervise", supervise)
    budget = rng.choice([60, 300, 540])
    Session(tmp_path, budget, say=lambda text: None).run(STAGES)

    assert now[0] <= 1000 + budget
    assert all(0 < seconds <= each.seconds for each, seconds in given)
    assert [each for each, _ in given] == list(STAGES[: len(given)])
    left = results(tmp_path)
    assert [name for name, each in left.items() if each["status"] == "not started"] == [
        each.name for each in STAGES[len(given) :]
    ]


def test_the_first_command_comes_to_requests_of_4b_even_if_every_stage_takes_all_its_time():
    names = [each.name for each in STAGES]
    first = STAGES[: names.index("large") + 1]
    assert sum(each.seconds for each in first) <= 540
    assert sum(each.seconds for each in STAGES) <= 3 * 540, "and three commands to the end"


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


# On a machine that has nothing but NumPy, torch and Triton

HAS_TRITON = pytest.mark.skipif(not (find_spec("torch") and find_spec("triton")), reason="needs torch and triton")


def test_the_bare_machine_has_none_of_the_projects_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in project["dependencies"]}
    installed = {name for name in (required - {"numpy", "jinja2", "packaging"}) if find_spec(name)}  # torch has jinja2

    assert {"gguf", "numba", "tokenizers", "typer", "rich"} <= installed
    assert installed <= refused_packages()
    assert not refused_packages() & {"numpy", "torch", "triton", "forge"}


def test_the_session_itself_needs_the_standard_library_alone():
    code = (
        "import sys, forge.bench.gpu_session;"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "ours = {'forge', '__main__', '_distutils_hack', 'sitecustomize'};"
        "print(sorted(loaded - set(sys.stdlib_module_names) - ours))"
    )
    found = run_python(["-c", code], **bare_environment())

    assert found.stdout.splitlines() == ["[]"], found.stderr


GENERATE = """
from forge import SamplingParams
from forge.backends.cuda.interpreter import repaired_interpreter
from forge.bench.drawn_model import drawn_llm
from forge.model.synth import synthetic_config

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
config = synthetic_config(num_layers=1, head_dim=16, vocab_size=270, **sizes)
with repaired_interpreter():
    for kv in ("paged", "prefix"):
        llm = drawn_llm(config, device="cpu", kv=kv, max_model_len=32)
        for params in ({}, {"temperature": 1.0, "seed": 1}, {"frequency_penalty": 1.0, "logprobs": 2}):
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True, **params))
            assert len(output.outputs[0].token_ids) == 2
"""


@HAS_TRITON
def test_the_core_path_looks_for_no_package_but_numpy_torch_and_triton(tmp_path):
    """Prefills and decodes, greedy and drawn."""
    refused = tmp_path / "refused"
    found = run_python(["-c", GENERATE], **bare_environment(refused))

    assert found.returncode == 0, found.stderr
    assert not refused.exists(), refused.read_text()


@HAS_TRITON
def test_stages_of_a_rehearsal_run_on_the_bare_machine(tmp_path):
    """All that need no package; and those that do name it and are skipped."""
    refused = tmp_path / "refused"
    names = "machine,compiling,steps,bundled,tests,record,http,peers"
    if os.environ.get("FORGE_HYPOTHESIS_PROFILE") == "fuzz":
        names = ",".join(each.name for each in STAGES)
    command = ["-m", "forge.bench.gpu_session", "--out", str(tmp_path / "out"), "--rehearse", "--stages", names]
    done = run_python(command, **bare_environment(refused))

    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    wrong = {name: each for name, each in found.items() if each["status"] not in ("done", "skipped")}
    assert wrong == {}, (tmp_path / "out/log.txt").read_text()[-4000:]
    skipped = {name: each["reason"] for name, each in found.items() if each["status"] == "skipped"}
    assert skipped.keys() == {"bundled", "tests", "record", "http", "peers"}
    assert all(reason.startswith("needs ") for reason in skipped.values())
    machine = found.pop("machine")
    assert {"gguf"} == set(machine["figures"]["missing packages"]["model files"])
    failed = [value for each in found.values() for value in each["figures"].values() if "'failed'" in str(value)]
    assert failed == []
    asked = {line.rpartition(":")[0].rpartition("/")[2] for line in refused.read_text().splitlines()}
    assert asked == {"gpu_stages.py"}, "only the stages look for what is installed"


@HAS_TRITON
def test_the_cuda_tests_are_all_collected_where_nothing_but_pytest_is_added():
    """One that is not would end the session's tests before they begin."""
    command = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--confcutdir=tests/backends/cuda"]
    environment = bare_environment(also=("pytest",)) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python([*command, "tests/backends/cuda"], **environment)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "tests collected" in done.stdout.splitlines()[-1]


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
