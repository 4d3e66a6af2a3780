"""A grammar that explodes is refused within a bounded time, beside others that are not held up, and without a trace."""

import json
import math
import os
import signal
import time
from concurrent.futures import CancelledError, as_completed
from pathlib import Path

import pytest

from forge import LLM, SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar import sandbox as sandbox_module
from forge.grammar.sandbox import CompilersBusy, GrammarSandbox
from forge.grammar.sandbox_process import MOST, QUICK, Lane, Supervisor
from forge.grammar.vocabulary import Vocabulary

PATIENCE = 60
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
    """One that never ran may come back later; one that took its time before is refused."""
    supervisor, answers = object.__new__(Supervisor), []
    late = {"form": {"regex": "a"}, "deadline": 0.0}
    supervisor._quick = Lane(None, QUICK, newest_first=True, waiting=[late | {"id": 1}])
    supervisor._slow = Lane(None, MOST, newest_first=False, waiting=[late | {"id": 2}, late | {"id": 3} | NEVER])
    supervisor._lanes = (supervisor._quick, supervisor._slow)
    monkeypatch.setattr(supervisor, "_answer", lambda job, answer: answers.append((job["id"], answer)))
    supervisor._drop_late()
    (_, busy), (_, refused) = answers
    assert busy == {"busy": True} and "it takes more than 0.1 s to compile" in refused["error"]
    assert [job["id"] for job in supervisor._slow.waiting] == [3] and not supervisor._quick.waiting


def test_a_worker_that_was_killed_is_replaced(sandbox):
    for worker in descendants(pid_of(sandbox)):
        os.kill(worker, signal.SIGKILL)
    assert sandbox.check(sound(800)).result(PATIENCE), "also where it was handed to the one that dies"


def test_nothing_is_left_of_a_closed_sandbox(tokenizer):
    sandbox = GrammarSandbox(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))
    sandbox.check(StructuredOutput(regex="a")).result(PATIENCE)
    processes = [pid_of(sandbox), *descendants(pid_of(sandbox))]
    assert len(processes) == 3
    exploding = sandbox.check(doubling())
    sandbox.close()
    assert isinstance(exploding.exception(PATIENCE), CompilersBusy)
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def test_an_llm_refuses_it_and_goes_on():
    llm = LLM("tales", kv="paged", num_blocks=64)
    with pytest.raises(UsageError, match="the JSON schema is refused: it takes more than"):
        llm.generate("Once", SamplingParams(max_tokens=4, structured=doubling()))
    structured = StructuredOutput(json={"enum": ["fox"]})
    (output,) = llm.generate("Once", SamplingParams(max_tokens=20, structured=structured))
    assert json.loads(output.outputs[0].text) == "fox"
    assert not llm.engine.has_unfinished()
