"""A grammar that explodes is refused within a bounded time, beside others that are not held up, and without a trace."""

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError, Future, as_completed
from itertools import islice
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from forge import LLM, SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar import sandbox as sandbox_module
from forge.grammar.sandbox import CompilersBusy, GrammarSandbox, SandboxedCompiler, _shared_sandbox
from forge.grammar.sandbox_process import LANES, Lane, Supervisor
from forge.grammar.vocabulary import Vocabulary
from tests.waiting import PATIENCE, until

NEVER = {"deadline": math.inf}


def doubling(depth: int = 30, name: str = "x") -> StructuredOutput:
    """2.3 kB that stand for 2**depth schemas."""
    parts = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return StructuredOutput(json={"$defs": parts | {f"a{depth}": {"const": name}}, "$ref": "#/$defs/a0"})


PRIMES = StructuredOutput(json={"allOf": [{"multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19)]})
SLOW_GBNF = "root ::= a0\n" + "\n".join(f'a{i} ::= "x{i}" a{i + 1}' for i in range(2000)) + '\na2000 ::= "z"'
EMPTY_LINES = "\n" * 20_000 + 'a: "b"\nstart: a'


@pytest.fixture(scope="module")
def sandbox(tokenizer):
    sandbox = GrammarSandbox(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))
    sandbox.check(StructuredOutput(regex="warm")).result(PATIENCE)
    yield sandbox
    sandbox.close()


def sound(number: int) -> StructuredOutput:
    return StructuredOutput(json={"type": "string", "maxLength": number})


def pid_of(sandbox: GrammarSandbox) -> int:
    return sandbox._process._popen.pid


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]


@pytest.mark.parametrize(
    ("structured", "named"),
    [
        (doubling(), "the JSON schema is refused: it takes more than"),
        (PRIMES, "the JSON schema is refused: it takes more than"),
        (StructuredOutput(grammar=SLOW_GBNF), "the grammar is refused: it takes more than"),
        (StructuredOutput(grammar='root ::= "a" | "a" | ' + "(" * 20_000), "the grammar is refused: it is nested too"),
        (StructuredOutput(json={"type": "array", "uniqueItems": True}), "uniqueItems: not supported"),
        (StructuredOutput(choice=["x" * 70_000]), "at most"),
    ],
    ids=["doubling", "primes", "slow gbnf", "deep gbnf", "unsupported", "large"],
)
def test_what_exceeds_the_limits_is_refused_by_name_and_the_next_one_is_not(sandbox, structured, named):
    with pytest.raises(UsageError) as caught:
        sandbox.check(structured).result(PATIENCE)
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert sandbox.check(sound(len(named))).result(PATIENCE)


def test_a_sound_grammar_passes_an_explosive_crowd(sandbox):
    crowd = [sandbox.check(doubling(30, f"crowd{number}")) for number in range(20)]
    assert sandbox.check(sound(500)).result(PATIENCE)
    assert sum(waiter.done() for waiter in crowd) < 5
    assert sandbox.num_waiting > 10
    for waiter in crowd:
        assert waiter.cancel()
    assert sandbox.num_waiting == 0
    assert sandbox.check(sound(501)).result(PATIENCE)


def test_a_crowd_is_refused_in_a_bounded_time_without_waiting_for_the_second_worker(sandbox):
    crowd = [
        sandbox.check(StructuredOutput(json=json.loads(PRIMES.json) | {"title": f"shed{number}"}))
        for number in range(12)
    ]
    messages = (str(waiter.exception()) for waiter in as_completed(crowd, PATIENCE))
    assert any("it takes more than 0.1 s to compile, and 8 such wait" in message for message in messages)
    for waiter in crowd:
        waiter.cancel()


def test_most_of_a_crowd_is_refused_after_its_first_slice(sandbox):
    crowd = [sandbox.check(doubling(30, f"many{number}")) for number in range(50)]
    messages = [str(waiter.exception(PATIENCE)) for waiter in islice(as_completed(crowd, PATIENCE), 12)]
    assert any("it takes more than 0.02 s to compile, and 32 such wait" in message for message in messages)
    for waiter in crowd:
        waiter.cancel()


@pytest.mark.parametrize(
    ("number", "work", "expected"),
    [(0, 1 << 30, "and 32 such wait"), (0, 9000, {"busy": True}), (1, 9000, "and 8 such wait"), (2, 9000, "0.5 s")],
)
def test_of_too_many_that_wait_for_a_lane_the_one_with_the_most_work_leaves(monkeypatch, number, work, expected):
    """What is refused need not come again, so one whose work is not known to be too much is only sent away."""
    supervisor, answers = object.__new__(Supervisor), []
    supervisor._lanes = [Lane(None, *slice_) for slice_ in LANES]
    monkeypatch.setattr(supervisor, "_answer", lambda job, answer: answers.append((job["id"], answer)))
    jobs = [{"id": index, "form": {"regex": "a"}, "work": work if index == 3 else 5} for index in range(40)]
    for job in [jobs[3]] if number == 2 else jobs:
        supervisor._take_back(supervisor._lanes[number], job, signal.SIGPROF)
    index, answer = answers[0]
    assert index == 3 and (answer == expected or expected in answer["error"])


def test_equal_grammars_share_a_job_and_the_decision_is_remembered(sandbox):
    first, second = sandbox.check(doubling(30, "equal")), sandbox.check(doubling(30, "equal"))
    assert sandbox.num_waiting == 1
    first.cancel()
    assert sandbox.num_waiting == 1, "the other one still waits"
    assert isinstance(second.exception(PATIENCE), UsageError)
    again = sandbox.check(doubling(30, "equal"))
    assert again.done() and isinstance(again.exception(), UsageError)
    with pytest.raises(CancelledError):
        first.result()


def test_the_queue_is_bounded(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox_module, "MAX_JOBS", 2)
    waiting = [sandbox.check(doubling(30, f"bound{number}")) for number in range(2)]
    with pytest.raises(CompilersBusy, match="2 grammars are waiting"):
        sandbox.check(sound(600))
    for waiter in waiting:
        waiter.cancel()


def test_what_takes_long_to_read_is_handed_on_in_a_notation_that_does_not(sandbox):
    checked = sandbox.check(StructuredOutput(grammar='root ::= "yes" | "no"')).result(PATIENCE)
    assert "::=" not in checked.grammar and "start" in checked.grammar
    assert sandbox.check(StructuredOutput(grammar=EMPTY_LINES)).result(PATIENCE).grammar == EMPTY_LINES


def test_a_process_that_was_killed_is_replaced_and_its_jobs_are_done(sandbox):
    waiter = sandbox.check(doubling(30, "killed"))
    os.kill(pid_of(sandbox), signal.SIGKILL)
    assert sandbox.check(sound(700)).result(PATIENCE)
    assert isinstance(waiter.exception(PATIENCE), UsageError)


def test_a_job_whose_time_is_up_leaves_its_lane(monkeypatch):
    """One that waits for a first lane may come back later; one that took its time before is refused."""
    supervisor, answers = object.__new__(Supervisor), []
    late = {"form": {"regex": "a"}, "deadline": 0.0}
    waiting = [[late | {"id": 1}], [], [late | {"id": 2}, late | {"id": 3} | NEVER]]
    supervisor._lanes = [Lane(None, *slice_, waiting=jobs) for slice_, jobs in zip(LANES, waiting, strict=True)]
    monkeypatch.setattr(supervisor, "_answer", lambda job, answer: answers.append((job["id"], answer)))
    supervisor._drop_late()
    (_, busy), (_, refused) = answers
    assert busy == {"busy": True} and "it takes more than 0.1 s to compile" in refused["error"]
    assert [[job["id"] for job in lane.waiting] for lane in supervisor._lanes] == [[], [], [3]]


class Played:
    """A process that a test plays."""

    def __init__(self, vocabulary, on_answer, on_end):
        self.on_answer, self.on_end = on_answer, on_end
        self.orders, self.is_closed = [], False

    def send(self, order):
        self.orders.append(order)

    def close(self):
        self.is_closed = True


@pytest.fixture
def played(monkeypatch) -> GrammarSandbox:
    monkeypatch.setattr(sandbox_module, "_Process", Played)
    return GrammarSandbox(Mock())


def regex(name: str, **thinking) -> StructuredOutput:
    return StructuredOutput(regex=name, **thinking)


def answer(sandbox: GrammarSandbox, number: int, **decided) -> None:
    sandbox._process.on_answer({"id": number, **(decided or {"form": {"regex": f"read {number}"}, "is_slow": False})})


def test_a_job_is_cancelled_when_its_last_waiter_leaves_and_not_before(played):
    first, second, other = (played.check(regex(name)) for name in "aab")
    orders = played._process.orders
    assert orders == [{"id": 0, "form": {"regex": "a"}}, {"id": 1, "form": {"regex": "b"}}]
    first.cancel()
    assert len(orders) == 2
    second.cancel()
    assert orders[2:] == [{"cancel": 0}] and played.num_waiting == 1
    answer(played, 0)
    played.check(regex("a"))
    assert orders[3:] == [{"id": 2, "form": {"regex": "a"}}], "what was cancelled is not decided"
    answer(played, 1, form={"regex": "c"}, is_slow=True)
    other.cancel()
    assert other.result() == regex("c") and other.result().is_slow and orders[4:] == []


def test_decisions_are_remembered_and_the_one_that_was_not_used_for_longest_is_dropped(played, monkeypatch):
    monkeypatch.setattr(sandbox_module, "MAX_REMEMBERED", 2)
    waiters = [played.check(regex(name)) for name in "ab"]
    answer(played, 0, error="no")
    answer(played, 1)
    assert str(waiters[0].exception()) == "no" and waiters[1].result() == regex("read 1")
    assert str(played.check(regex("a", thinking="open")).exception()) == "no", "the thinking is no part of it"
    played.check(regex("c"))
    answer(played, 2)
    assert [played.check(regex(name)).done() for name in "acb"] == [True, True, False]


def test_what_was_too_much_for_now_is_not_remembered(played):
    waiter = played.check(regex("a"))
    played.check(regex("b"))
    answer(played, 0, busy=True)
    with pytest.raises(CompilersBusy, match="1 grammars are waiting"):
        waiter.result()
    assert not played.check(regex("a")).done() and len(played._process.orders) == 3


def test_the_jobs_of_a_process_that_died_go_to_another_one_once(played):
    waiters = [played.check(regex("a"))]
    first = played._process
    first.on_end(first)
    second = played._process
    assert second is not first and second.orders == first.orders
    waiters.append(played.check(regex("b")))
    first.on_end(first)
    assert played._process is second, "it has been replaced before"
    second.on_end(second)
    assert str(waiters[0].exception()) == "the process that compiles grammars has died"
    assert not waiters[1].done() and played._process.orders == [{"id": 1, "form": {"regex": "b"}}]
    answer(played, 1)
    assert waiters[1].result() == regex("read 1")


def test_a_closed_sandbox_fails_what_waits_and_starts_again_with_the_next_grammar(played):
    played.close()
    played.start()
    process = played._process
    played.start()
    assert played._process is process
    waiters = [played.check(regex(name)) for name in "aab"]
    waiters[0].cancel()
    played.close()
    assert [str(waiter.exception()).split()[0] for waiter in waiters[1:]] == ["2", "2"]
    assert process.is_closed and process.orders == process.orders[:2] and played.num_waiting == 0
    process.on_end(process)
    assert played._process is None
    assert not played.check(regex("a")).done() and played._process is not process


def test_a_grammar_is_compiled_as_the_sandbox_hands_it_on_with_the_thinking_that_was_asked_for(monkeypatch):
    compiler, sandbox = Mock(), Mock()
    sandbox.check.return_value = waiter = Future()
    monkeypatch.setattr(sandbox_module, "_shared_sandbox", {compiler.vocabulary: sandbox}.__getitem__)
    sandboxed = SandboxedCompiler(compiler)
    waiter.set_result(regex("b"))
    assert sandboxed(regex("a", thinking="open")) is compiler.return_value
    assert compiler.call_args == call(regex("b", thinking="open")) and compiler.load.call_count == 1
    sandbox.check.return_value = waiter = Future()
    compiler.load.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        sandboxed(regex("a"))
    assert waiter.cancelled()


def test_models_of_one_vocabulary_share_a_sandbox():
    same, equal, other = (Vocabulary(tokens, [0], frozenset({0})) for tokens in ([b"a"], [b"a"], [b"b"]))
    shared = _shared_sandbox(same)
    assert shared is _shared_sandbox(same) is _shared_sandbox(equal) is not _shared_sandbox(other)
    assert shared._vocabulary() is same


STAND_IN = """
import json, sys, time
from forge.grammar.sandbox_process import Supervisor, _Lines

def compile_(structured):
    name = structured.regex.split("+")[0]
    with open(sys.argv[1], "a") as log:
        log.write(name + "\\n")
    begin = time.process_time()
    while name == "bomb" or (name == "medium" and time.process_time() - begin < 0.05):
        pass

supervisor = Supervisor(compile_, _Lines(0), 1)
for number, name in enumerate(sys.argv[2:]):
    supervisor.take_order({"id": number, "form": {"regex": name}})
    supervisor._lanes[0].begin_next()
supervisor.run()
"""


def test_ordinary_grammars_are_compiled_before_bombs_get_a_second_slice(tmp_path):
    """Whether they came before or after; and one that needs a second slice gets it before those that need more."""
    bombs = [f"bomb+a{{{number}}}" for number in range(100, 106)]
    names = ["bomb", "quick", *bombs, "medium", "quick+"]
    command = [sys.executable, "-c", STAND_IN, str(tmp_path / "log"), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        answers = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdin.close()
    assert [names[answer["id"]] for answer in answers] == ["quick", "quick+", "medium"]
    assert answers[2]["is_slow"]
    begun = (tmp_path / "log").read_text().split()
    assert begun.index("quick") <= 2 and begun.count("quick") == 2 and begun.count("medium") == 2


def test_a_worker_that_was_killed_is_replaced(sandbox):
    for worker in descendants(pid_of(sandbox)):
        os.kill(worker, signal.SIGKILL)
    assert sandbox.check(sound(800)).result(PATIENCE), "also where it was handed to the one that dies"


def test_nothing_is_left_of_a_closed_sandbox(tokenizer):
    sandbox = GrammarSandbox(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))
    sandbox.check(StructuredOutput(regex="a")).result(PATIENCE)
    processes = [pid_of(sandbox), *descendants(pid_of(sandbox))]
    assert len(processes) == 1 + len(LANES)
    exploding = sandbox.check(doubling())
    sandbox.close()
    assert isinstance(exploding.exception(PATIENCE), CompilersBusy)
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


def test_an_llm_refuses_it_and_goes_on():
    llm = LLM("tales", kv="paged", num_blocks=64)
    with pytest.raises(UsageError, match="the JSON schema is refused: it takes more than"):
        llm.generate("Once", SamplingParams(max_tokens=4, structured=doubling()))
    structured = StructuredOutput(json={"enum": ["fox"]})
    (output,) = llm.generate("Once", SamplingParams(max_tokens=20, structured=structured))
    assert json.loads(output.outputs[0].text) == "fox"
    assert not llm.engine.has_unfinished()
