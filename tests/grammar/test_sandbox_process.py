"""The supervisor's decisions with workers that a test plays, and a worker alone: its limits, and how it may end."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar import sandbox_process
from forge.grammar.compiler import TOO_DEEP
from forge.grammar.sandbox_process import (
    DEADLINE,
    LANES,
    MEMORY,
    STACK,
    Lane,
    Supervisor,
    _address_space,
    _compiled,
    _limit,
    _Lines,
    _Worker,
    _write_line,
    vocabulary_from_json,
    vocabulary_to_json,
)
from forge.grammar.vocabulary import Vocabulary

FORM = {"regex": "a"}
NOW = 100.0
BYTES = Vocabulary([b"", *(bytes([byte]) for byte in range(256))], [0], frozenset({0}))


def job(number: int, work: int = 5, deadline: float = math.inf) -> dict:
    return {"id": number, "form": FORM, "work": work, "deadline": deadline}


@pytest.fixture
def supervisor(monkeypatch) -> Supervisor:
    """A supervisor whose workers do nothing, at a moment that stays; it writes answers to a pipe."""
    monkeypatch.setattr(sandbox_process, "_Worker", lambda compile_, nice: Mock(compile=compile_, nice=nice))
    monkeypatch.setattr("time.monotonic", lambda: NOW)
    told, answers = os.pipe()
    supervisor = Supervisor(Mock(), Mock(fd=-1), answers)
    supervisor.told = _Lines(told)  # type: ignore[attr-defined]
    return supervisor


def told(supervisor) -> list[dict]:
    _write_line(supervisor._answers, "end")
    *lines, end = map(json.loads, supervisor.told.read())
    assert end == "end"
    return lines


def waiting(supervisor: Supervisor) -> list[list[int]]:
    return [[job["id"] for job in lane.waiting] for lane in supervisor._lanes]


# Jobs and lanes


def test_a_lane_begins_the_job_with_the_least_work_and_of_equals_the_newest():
    lane, begun = Lane(Mock(), 0.5, 0, waiting=[job(1, 7), job(2, 5), job(3, 5), job(4, 9)]), []
    while lane.waiting:
        lane.begin_next()
        lane.begin_next()
        begun.append(lane.job["id"])
        assert lane.worker.begin.call_args == call(lane.job, 0.5)
        lane.job = None
    lane.begin_next()
    assert begun == [3, 2, 1, 4] and lane.worker.begin.call_count == 4


def test_an_order_queues_a_job_in_the_first_lane_and_another_one_cancels_it_in_any(supervisor):
    first, second, third = supervisor._lanes
    assert [(lane.seconds, lane.nice, lane.worker.nice) for lane in supervisor._lanes] == [(*s, s[1]) for s in LANES]
    supervisor.take_order({"id": 1, "form": {"regex": "a{1,40}"}})
    supervisor.take_order({"id": 2, "form": FORM})
    long, short = first.waiting
    assert long["work"] > short["work"] and long["deadline"] == short["deadline"] == NOW + DEADLINE
    second.waiting, third.waiting = [job(3), job(4)], [job(5)]
    second.job, third.job = job(6), job(7)
    for number in (1, 3, 5, 6):
        supervisor.take_order({"cancel": number})
    assert waiting(supervisor) == [[2], [4], []]
    second.worker.kill.assert_called_once_with()
    third.worker.kill.assert_not_called()
    assert (second.job["is_over"], second.job["deadline"]) == (True, math.inf) and "is_over" not in third.job


def test_an_answer_frees_the_lane_and_says_whether_it_took_a_second_slice(supervisor):
    for number, lane in enumerate(supervisor._lanes):
        lane.job = job(number)
        lane.worker.answers.read.return_value = [b'{"form": 1}']
        supervisor._take_answer(lane)
        assert lane.job is None
    expected = [{"form": 1, "is_slow": number > 0, "id": number} for number in range(3)]
    assert told(supervisor) == expected


def test_a_worker_that_died_is_replaced_and_its_job_goes_on_unless_it_is_over(supervisor):
    for number, running in ((1, job(1)), (2, job(2) | {"is_over": True}), (0, None)):
        lane = supervisor._lanes[number]
        lane.job, before = running, lane.worker
        before.answers.read.side_effect, before.end.return_value = EOFError, signal.SIGPROF
        supervisor._take_answer(lane)
        assert lane.job is None and (lane.worker.compile, lane.worker.nice) == (supervisor._compile, lane.nice)
        assert lane.worker is not before and before.end.called
    assert waiting(supervisor) == [[], [], [1]] and told(supervisor) == []


def test_a_job_whose_worker_was_killed_is_tried_again_once(supervisor):
    lane = supervisor._lanes[1]
    supervisor._take_back(lane, job(1), signal.SIGKILL)
    (again,) = lane.waiting
    supervisor._take_back(lane, again, signal.SIGPROF)
    assert waiting(supervisor) == [[], [1], [1]], "after it was tried again it still gets its larger slice"
    supervisor._take_back(lane, again, signal.SIGKILL)
    (answer,) = told(supervisor)
    assert "it takes more than 256 MB to compile" in answer["error"] and answer["id"] == 1


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (signal.SIGSEGV, TOO_DEEP),
        (signal.SIGBUS, TOO_DEEP),
        (signal.SIGABRT, "it takes more than 256 MB to compile"),
        (1 << 8, "it takes more than 256 MB to compile"),
        (2 << 8, "the compiler failed at it"),
    ],
)
def test_a_job_of_which_a_worker_died_is_refused_by_name(supervisor, status, why):
    supervisor._take_back(supervisor._lanes[0], job(1), status)
    (answer,) = told(supervisor)
    assert answer["error"].startswith("the regular expression is refused: " + why)


def test_each_slice_is_followed_by_a_larger_one_and_the_last_by_a_refusal(supervisor):
    for lane in supervisor._lanes:
        supervisor._take_back(lane, job(1), signal.SIGPROF)
    assert waiting(supervisor) == [[], [1], [1]]
    (answer,) = told(supervisor)
    assert answer["error"].endswith("it takes more than 0.5 s to compile: make it simpler")


def test_a_running_job_whose_time_is_up_is_ended(supervisor):
    for number, lane in enumerate(supervisor._lanes):
        lane.job = job(number, deadline=NOW - 1 if number != 1 else NOW)
        lane.waiting = [job(10 + number, deadline=NOW)]
    supervisor._drop_late()
    supervisor._drop_late()
    busy, refused = told(supervisor)
    assert busy == {"busy": True, "id": 0} and refused["id"] == 2
    assert refused["error"].endswith("it takes more than 0.1 s to compile, and others wait: make it simpler")
    assert [lane.worker.kill.call_count for lane in supervisor._lanes] == [1, 0, 1]
    assert waiting(supervisor) == [[10], [11], [12]]


def test_what_happens_first_is_handled_and_only_a_busy_supervisor_looks_at_the_clock(supervisor, monkeypatch):
    first, second, third = supervisor._lanes
    for number, lane in enumerate(supervisor._lanes):
        lane.worker.answers.fd = 7 + number
    waits = []

    def select(reading, writing, failing, timeout):
        assert (reading, writing, failing) == ([-1, 7, 8, 9], [], [])
        waits.append(timeout)
        return ready, [], []

    monkeypatch.setattr("select.select", select)
    supervisor._jobs.read.return_value = [json.dumps({"id": number, "form": FORM}).encode() for number in (1, 2)]
    ready = [-1]
    supervisor._wait()
    assert waiting(supervisor) == [[1, 2], [], []]
    first.begin_next()
    third.job, ready = job(9), [9]
    third.worker.answers.read.return_value = [b"{}"]
    second.waiting = [job(3, deadline=NOW - 1)]
    supervisor._wait()
    assert waits == [None, 1.0] and (first.job["id"], third.job) == (2, None)
    assert [answer["id"] for answer in told(supervisor)] == [9, 3]


@pytest.mark.parametrize("end", [EOFError, BrokenPipeError])
def test_a_supervisor_begins_what_waits_and_ends_its_workers_with_its_input(supervisor, monkeypatch, end):
    supervisor.take_order({"id": 1, "form": FORM})
    monkeypatch.setattr(supervisor, "_wait", Mock(side_effect=[None, end]))
    supervisor.run()
    assert supervisor._lanes[0].job["id"] == 1
    assert all(lane.worker.end.call_count == 1 for lane in supervisor._lanes)


# A worker


def ended(worker: _Worker) -> int:
    """The status of a worker that has ended."""
    with pytest.raises(EOFError):
        while True:
            worker.answers.read()
    return worker.end()


def limits_of_a_worker(structured: StructuredOutput) -> None:
    """Refuse the grammar by what this process may do."""
    kinds = (resource.RLIMIT_CORE, resource.RLIMIT_STACK, resource.RLIMIT_AS)
    folder = Path("/proc/self/fd")
    files = {fd: os.readlink(folder / fd) for fd in os.listdir(folder) if (folder / fd).exists()}
    limits = [resource.getrlimit(kind)[0] for kind in kinds]
    raise UsageError(json.dumps([os.nice(0), limits, files, signal.getsignal(signal.SIGPROF)]))


def test_a_worker_is_limited_and_has_no_files_but_its_two_pipes(monkeypatch):
    size = _address_space()
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    spare = os.open(os.devnull, os.O_RDONLY)
    worker = _Worker(limits_of_a_worker, 2)
    signal.signal(signal.SIGPROF, before)
    os.close(spare)
    worker.begin(job(1), 0.5)
    (line,) = worker.answers.read()
    nice, (core, stack, memory), files, handler = json.loads(json.loads(line)["error"])
    assert (nice, core, stack, handler) == (min(os.nice(0) + 2, 19), 0, STACK, signal.SIG_DFL)
    assert abs(memory - size - MEMORY) < 32 << 20
    pipes = [name for name in files.values() if name.startswith("pipe:")]
    assert len(pipes) == 2 and [files[fd] for fd in "012"] == [os.devnull] * 3 and len(files) == 5
    jobs, answers = worker._jobs, worker.answers.fd
    assert os.WTERMSIG(worker.end()) == signal.SIGKILL
    for fd in (jobs, answers):
        with pytest.raises(OSError):
            os.fstat(fd)
    worker.kill()


def runs_on(structured: StructuredOutput) -> None:
    while True:
        pass


def fails(structured: StructuredOutput) -> None:
    raise ValueError


def exhausts(structured: StructuredOutput) -> None:
    raise MemoryError


@pytest.mark.parametrize(("compile_", "status"), [(runs_on, signal.SIGPROF), (fails, 2 << 8), (exhausts, 1 << 8)])
def test_the_status_of_a_worker_says_what_it_died_of(compile_, status):
    worker = _Worker(compile_, 0)
    worker.begin(job(1), 0.01)
    with pytest.raises(EOFError):
        worker.answers.read()
    worker.begin(job(2), 0.01)
    assert ended(worker) == status


def test_the_time_of_a_job_is_limited_while_it_is_compiled_and_no_longer(monkeypatch):
    timer, forms = Mock(), []
    monkeypatch.setattr("signal.setitimer", timer)
    answer = _compiled(forms.append, {"grammar": 'root ::= "a"'}, 0.5)
    assert answer == {"form": forms[0].form()} and "::=" not in forms[0].grammar
    assert _compiled(Mock(side_effect=UsageError("no")), FORM, 0.25) == {"error": "no"}
    kind = signal.ITIMER_PROF
    assert timer.call_args_list == [call(kind, 0.5), call(kind, 0), call(kind, 0.25), call(kind, 0)]


def test_a_limit_is_lowered_as_far_as_the_system_lets(monkeypatch):
    lowered = Mock(side_effect=[None, None, ValueError])
    monkeypatch.setattr("resource.setrlimit", lowered)
    for hard in (resource.RLIM_INFINITY, 50, 500):
        monkeypatch.setattr("resource.getrlimit", lambda kind, hard=hard: (9, hard))
        _limit(3, 100)
    assert lowered.call_args_list == [call(3, (100, resource.RLIM_INFINITY)), call(3, (50, 50)), call(3, (100, 500))]


def test_the_address_space_is_what_the_system_says_where_it_says_something(monkeypatch):
    with open("/proc/self/status") as file:
        (kilobytes,) = (int(line.split()[1]) for line in file if line.startswith("VmSize:"))
    assert abs(_address_space() - (kilobytes << 10)) < 64 << 20
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", Mock(side_effect=OSError))
        size = _address_space()
    assert size == 4 << 30


# Lines


def test_lines_are_put_together_from_pieces():
    reading, writing = os.pipe()
    lines = _Lines(reading)
    for piece, whole in ((b"a\nb", [b"a"]), (b"c", []), (b"d\n\ne\n", [b"bcd", b"", b"e"])):
        os.write(writing, piece)
        assert lines.read() == whole
    os.close(writing)
    with pytest.raises(EOFError):
        lines.read()
    os.close(reading)


def test_a_line_that_a_pipe_takes_in_parts_is_written_whole(monkeypatch):
    written = bytearray()

    def write(fd, data):
        assert fd == 5
        written.extend(data[:3])
        return min(3, len(data))

    monkeypatch.setattr("os.write", write)
    _write_line(5, {"some": "words"})
    assert written == b'{"some": "words"}\n'


def test_a_vocabulary_is_the_same_after_its_way_through_a_pipe():
    assert vocabulary_from_json(json.loads(json.dumps(vocabulary_to_json(BYTES)))).fingerprint == BYTES.fingerprint


def test_the_process_takes_jobs_that_come_with_the_vocabulary_and_ends_with_its_input_alone():
    command = [sys.executable, "-m", "forge.grammar.sandbox_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        orders = [vocabulary_to_json(BYTES), *({"id": number, "form": {"regex": "ab"}} for number in range(3))]
        process.stdin.write(b"".join(json.dumps(order).encode() + b"\n" for order in orders))
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(3)]
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        process.stdin.write(json.dumps({"id": 9, "form": {"regex": "("}}).encode() + b"\n")
        process.stdin.flush()
        refused = json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.stdout.read() == b""
    assert sorted(answer["id"] for answer in answers) == [0, 1, 2]
    assert all(answer["form"] == {"regex": "ab"} for answer in answers)
    assert process.returncode == 0 and refused["id"] == 9 and "error" in refused
