"""A server's clients: those who read, one who leaves, one who reads late; and the server that is started for them."""

import json
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from forge.errors import ForgeError
from forge.experiments.serving.clients import Crowd, Crowded, Ending, Overload, Visit, parse_metrics
from forge.server.server_process import ServerProcess
from tests.cli.conftest import ROOT, environment, forge  # noqa: F401 (a fixture)
from tests.waiting import PATIENCE, until

REFUSED = Overload(64, 429, 0.5, "1", 200)
FEW = ("--model", "hash", "--clients", "2", "--max-tokens", "40", "--every", "5")


def test_the_experiment_serves_everybody_and_leaves_no_process(forge):  # noqa: F811
    found = forge("serving", "--json", *FEW)
    assert found.status == 0 and found.err == ""
    facts = json.loads(found.out)
    assert [client["kind"] for client in facts["clients"]] == ["reads", "leaves", "late", "reads"]
    assert all(client["tokens"] == 40 for client in facts["clients"] if client["kind"] != "leaves")
    assert facts["identical"] and facts["steps"]["seen"] > 0
    assert 0 < facts["late"]["done_after_ms"] < facts["late"]["all_read_after_ms"] and facts["leaver"]["steps"] > 0
    overload = facts["overload"]
    assert (overload["status"], overload["status_later"]) == (429, 200) and int(overload["retry_after"]) > 0
    assert facts["ending"]["exit_status"] == 0 and facts["ending"]["refused"] != "200"
    assert facts["metrics"]["running_afterwards"] == facts["metrics"]["used_afterwards"] == 0


def test_a_server_that_cannot_start_says_why_in_one_line():
    with ServerProcess(["--model", "nothing.gguf"]) as server, pytest.raises(ForgeError, match="no such file"):
        server.wait_until_ready()
    assert server._process.poll() == 2


@pytest.mark.slow
def test_ctrl_c_ends_the_server_too():
    started = (sys.executable, "-m", "forge", "serving", "--only", "run", *FEW[:-1], "1000")
    process = subprocess.Popen(started, stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment())

    def children(pid: int | str) -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    assert until(lambda: [engine for server in children(process.pid) for engine in children(server)])
    servers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and b"Traceback" not in err
    assert servers and not [server for server in servers if Path(f"/proc/{server}").exists()]


def test_without_the_libraries_one_line_says_what_to_install(forge, monkeypatch):  # noqa: F811
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    found = forge("serving")
    assert found.status == 2 and found.out == ""
    assert found.err == "forge: serving needs fastapi and uvicorn: pip install fastapi uvicorn\n"


@pytest.mark.parametrize("options", [("--clients", "0"), ("--max-tokens", "0"), ("--every", "-1"), ("--every", "nan")])
def test_a_crowd_of_nobody_is_refused(forge, options):  # noqa: F811
    found = forge("serving", *options)
    assert found.status == 2 and found.err.count("\n") == 1


def test_metrics_are_summed_over_their_labels():
    text = "\n".join(
        (
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0"} 2',
            'vllm:num_requests_running{engine="1"} 3',
            'vllm:request_success_total{engine="0",finished_reason="abort"} 1',
            'vllm:request_success_total{engine="0",finished_reason="stop"} 5',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        )
    )
    found = parse_metrics(text)
    assert (found["running"], found["aborted"], found["usage"], found["waiting"]) == (5.0, 1.0, 0.25, 0.0)


def test_a_visit_without_text_has_no_times():
    visit = Visit(1.0)
    assert visit.ttft_ms is None and visit.itls_ms == []
    visits = (visit, Visit(0.0, kind="leaves"), Visit(0.0, kind="late"))
    empty = Crowded(Crowd(), visits, (), (), {}, REFUSED, visit, Ending(visit, "503", 0, 0.1), (), 1.0)
    assert empty.steps_missed == empty.steps_after_leaving == 0 and empty.sequence_of(visit) is None
