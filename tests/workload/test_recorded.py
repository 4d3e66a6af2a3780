"""A recorded run replayed as a workload: its arrivals, lengths and priorities."""

import json

import pytest

from forge.cli.main import main
from forge.errors import UsageError
from forge.trace.recorder import TraceError
from forge.workload.requests import recorded_requests, recorded_workload
from tests.cli.conftest import forge  # noqa: F401 (a fixture)
from tests.cli.test_errors import complaint

ROWS = ("-m", "hash", "-n", "7", "--prompt-tokens", "5:30", "--max-tokens", "3:9", "--order", "priority", "--no-lines")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    assert main(["trace-scheduler", *ROWS, "--arrival", "poisson:200", "--trace", str(path)]) == 0
    return path


def _sequences(forge, *line) -> list[tuple]:  # noqa: F811
    found = json.loads(forge("trace-scheduler", "-m", "hash", *line, "--json").out)["sequences"]
    return sorted((one["num_prompt_tokens"], one["num_output_tokens"]) for one in found)


def test_a_replayed_run_has_the_lengths_of_the_recorded_one(forge, trace):  # noqa: F811
    recorded = recorded_requests(trace)
    assert len(recorded) == 7 and len({request.output_tokens for request in recorded}) > 1
    lengths = sorted((request.prompt_tokens, request.output_tokens) for request in recorded)
    assert _sequences(forge, "--workload", str(trace)) == lengths
    assert _sequences(forge, "--workload", str(trace), "--max-num-seqs", "1") == lengths, "whatever runs it"


def test_requests_come_when_they_came_and_with_their_priority(trace):
    recorded = recorded_requests(trace)
    arrivals = [request.arrival for request in recorded]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and 0 < arrivals[-1] < 5
    assert len({request.priority for request in recorded}) > 1
    workload = recorded_workload(trace, type("Letters", (), {"encode": lambda self, text: list(map(ord, text))})())
    assert workload.clock == "seconds"
    assert [(request.arrival, request.priority) for request in workload.requests] == [
        (request.arrival, request.priority) for request in recorded
    ]


def test_a_file_without_arrivals_or_that_is_no_trace_is_refused(forge, trace, tmp_path):  # noqa: F811
    headed = tmp_path / "headed.jsonl"
    headed.write_text(trace.read_text().splitlines()[0] + "\n")
    with pytest.raises(UsageError, match="no request arrived in this record"):
        recorded_requests(headed)
    (tmp_path / "other").write_text("x\n")
    with pytest.raises(TraceError):
        recorded_requests(tmp_path / "other")
    for command in ("trace-scheduler", "bench serve"):
        found = forge(*command.split(), "--workload", str(tmp_path / "none"))
        assert found.status == 2 and "No such file" in complaint(found)
