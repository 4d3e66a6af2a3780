"""The engine's end of the socket, with a model that says what a test wants: faults inside a step, floods, farewells."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.engine.task import Task
from forge.errors import UsageError
from forge.server import engine_process
from forge.server.engine_process import EngineServer
from forge.server.messages import Abort, Ask, AskTasks, Inbox, Submit, Update, Watch, Withdraw, frame
from tests.engine.scripted import PIECES, letters, muddled, new_engine
from tests.waiting import PATIENCE

MERGED = ("accepted", "refused", "tokens", "sample_ends", "ends", "answers", "steps", "records")


class Peer:
    """The other end of an `EngineServer` that runs on a thread."""

    def __init__(self, engine):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.inbox = Inbox()
        self.server = EngineServer(SimpleNamespace(engine=engine, device="cpu"), theirs)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def submit(self, key: int, prompt: str, stream: bool = True, **params) -> None:
        ids = letters(prompt)
        self.send(Submit(key, f"r{key}", ids, SamplingParams(**params), None, 0, "", stream))

    def send(self, command) -> None:
        self.socket.sendall(frame(command))

    def until(self, condition) -> Update:
        """Everything that has come when `condition` of it holds, as one update."""
        whole = Update()
        while not condition(whole):
            for update in self.inbox.feed(self.socket.recv(1 << 16)):
                for name in MERGED:
                    getattr(whole, name).extend(getattr(update, name))
                whole.gauges = update.gauges or whole.gauges
        return whole

    def close(self) -> None:
        self.socket.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def peer():
    peers = []

    def start(script, **options) -> Peer:
        peers.append(Peer(new_engine(script, **options)))
        return peers[-1]

    yield start
    for one in peers:
        one.close()


def test_a_stream_brings_every_token_and_the_same_text_as_the_output(peer):
    one = peer(muddled, kv="paged")
    one.submit(1, "abc", max_tokens=8, n=2, temperature=1.0, seed=3)
    found = one.until(lambda update: update.ends)
    for sample in found.ends[0].output.outputs:
        tokens = [(token_id, text) for _, index, token_id, text, _ in found.tokens if index == sample.index]
        ends = [end for end in found.sample_ends if end.sample == sample.index]
        assert tuple(token_id for token_id, _ in tokens) == sample.token_ids
        assert "".join(text for _, text in tokens) + ends[0].text == sample.text


def test_what_is_not_streamed_comes_once(peer):
    one = peer(muddled)
    one.submit(1, "abc", stream=False, max_tokens=8)
    found = one.until(lambda update: update.ends)
    assert not found.tokens and not found.sample_ends and found.accepted == [1]


BROKEN = letters("z")[0]


def fails_at_z(tokens: list[int]) -> int:
    if tokens[-1] == BROKEN:
        raise ZeroDivisionError("a secret")
    return muddled(tokens)


def test_a_failing_step_fails_its_requests_and_the_next_ones_run(peer):
    one = peer(fails_at_z, kv="paged", max_num_seqs=2)
    one.submit(1, "ab", max_tokens=4, stop=["z"], logit_bias={BROKEN: -100.0})
    one.submit(2, "az", max_tokens=4)
    found = one.until(lambda update: len(update.ends) == 2)
    faults = {end.key: end.fault for end in found.ends}
    assert "ZeroDivisionError" in faults[2].message and "secret" not in faults[2].message
    one.submit(3, "abc", max_tokens=4, logit_bias={BROKEN: -100.0})
    found = one.until(lambda update: update.ends)
    assert found.ends[0].fault is None and found.ends[0].output.outputs[0].finish_reason in ("stop", "length")


def test_a_failing_step_leaves_those_alone_that_were_not_in_it(peer):
    """One may run at a time: the second generation and the question wait while the first one fails."""
    one = peer(fails_at_z, kv="paged", max_num_seqs=1)
    fine = {"max_tokens": 3, "logit_bias": {BROKEN: -100.0}, "ignore_eos": True}
    submits = [
        Submit(1, "r1", letters("az"), SamplingParams(max_tokens=4), None, 0, "", True),
        Submit(2, "r2", letters("ab"), SamplingParams(**fine), None, 0, "", True),
    ]
    one.socket.sendall(b"".join(map(frame, submits)))
    ends = {end.key: end for end in one.until(lambda update: len(update.ends) == 2).ends}
    assert "ZeroDivisionError" in ends[1].fault.message
    assert ends[2].fault is None and len(ends[2].output.outputs[0].token_ids) == 3


def test_questions_fail_with_the_step_they_are_in_and_others_do_not(peer):
    one = peer(fails_at_z, kv="paged")
    task = Task(candidates=(0, 1))
    one.send(AskTasks(1, [(letters("a"), task), (letters("z"), task)]))
    one.send(AskTasks(2, [(letters("abc"), task)]))
    answers = {one.number: one for one in one.until(lambda update: len(update.answers) == 2).answers}
    assert answers[1].fault.internal
    one.send(AskTasks(3, [(letters("abc"), task)]))
    (again,) = one.until(lambda update: update.answers).answers
    assert again.fault is None and len(again.value) == 1


def test_broken_logits_say_what_is_broken(peer):
    one = peer(lambda tokens: np.full(len(PIECES), np.nan, np.float32))
    one.submit(1, "ab")
    assert "not finite" in one.until(lambda update: update.ends).ends[0].fault.message


def test_a_request_that_cannot_run_is_refused(peer):
    one = peer(muddled, max_model_len=8)
    one.submit(1, "abcdefghijkl")
    one.submit(2, "abc", logit_bias={999: 1.0})
    found = one.until(lambda update: len(update.refused) == 2)
    assert "context" in found.refused[0].fault.message and "logit_bias" in found.refused[1].fault.message


def test_the_least_grammar_that_waits_is_compiled_next(peer):
    """Not the oldest: a crowd of large ones would hold an ordinary one up."""
    begun, may_go_on = [], threading.Event()

    def compile_grammar(structured):
        begun.append(structured.regex)
        assert may_go_on.wait(30)
        raise UsageError("enough")

    peer = peer(lambda tokens: "a")
    peer.server.engine.compile_grammar = compile_grammar
    for key, regex in enumerate(("first", "(a{9}b){99}", "(a{9}b){98}", "last")):
        peer.submit(key, "aa", structured=StructuredOutput(regex=regex))
    peer.send(Ask(9, "alive"))
    peer.until(lambda update: update.answers)
    may_go_on.set()
    assert len(peer.until(lambda update: len(update.refused) == 4).refused) == 4
    assert begun == ["first", "last", "(a{9}b){98}", "(a{9}b){99}"]


def test_a_command_that_fails_is_the_engines_own_fault_and_the_next_one_runs(peer):
    one = peer(muddled)
    add = one.server.engine.add_request
    one.server.engine.add_request = lambda *args, **options: 1 // 0
    one.submit(1, "ab")
    (refused,) = one.until(lambda update: update.refused).refused
    assert refused.fault.internal and "ZeroDivisionError" in refused.fault.message
    one.server.engine.add_request = add
    one.submit(2, "ab", max_tokens=2)
    assert one.until(lambda update: update.ends).ends[0].fault is None


def test_questions_in_a_failing_step_are_the_engines_own_fault(peer):
    def script(tokens):
        raise ZeroDivisionError

    one = peer(script)
    one.send(AskTasks(7, [(letters("ab"), Task(candidates=(0, 1)))]))
    (answer,) = one.until(lambda update: update.answers).answers
    assert answer.number == 7 and answer.fault.internal and answer.value is None


def test_a_withdrawn_question_leaves_nothing(peer):
    one = peer(muddled, kv="prefix")
    one.socket.sendall(frame(AskTasks(7, [(letters("ab"), Task(candidates=(0, 1)))] * 50)) + frame(Withdraw(7)))
    found = one.until(lambda update: update.answers and update.gauges and not update.gauges.waiting)
    assert len(found.answers) == 1 and found.gauges.used_blocks == 0
    one.send(Withdraw(7))
    one.submit(2, "ab", max_tokens=2)
    assert one.until(lambda update: update.ends).ends[0].fault is None


def test_the_requests_of_a_long_question_are_queued_over_several_steps(peer, monkeypatch):
    monkeypatch.setattr(engine_process, "_TOKENS_BETWEEN_STEPS", 8)
    one = peer(muddled, kv="prefix")
    queue, queued = one.server._queue_asked, []

    def count() -> None:
        before = len(one.server._asked)
        queue()
        queued.append(before - len(one.server._asked))

    one.server._queue_asked = count
    task = Task(candidates=(0, 1))
    one.send(AskTasks(7, [(letters("abcd"), task)] * 20))
    (answer,) = one.until(lambda update: update.answers).answers
    assert len(answer.value) == 20
    assert max(queued) == 2 and sum(queued) == 20


def test_a_question_whose_later_request_is_refused_fails_as_a_whole(peer, monkeypatch):
    monkeypatch.setattr(engine_process, "_TOKENS_BETWEEN_STEPS", 1)
    one = peer(muddled, kv="prefix", max_model_len=8)
    task = Task(candidates=(0, 1))
    one.send(AskTasks(7, [(letters("ab"), task), (letters("abcdefghijkl"), task), (letters("ab"), task)]))
    one.send(AskTasks(8, [(letters("ab"), task)]))
    answers = {answer.number: answer for answer in one.until(lambda update: len(update.answers) == 2).answers}
    assert "context" in answers[7].fault.message and answers[8].fault is None and len(answers[8].value) == 1


def test_an_aborted_request_holds_nothing_after_the_next_update(peer):
    one = peer(lambda tokens: 1, max_model_len=10_000, num_blocks=3000, kv="paged")
    one.submit(1, "abc", max_tokens=9000)
    one.until(lambda update: update.tokens)
    one.send(Abort(1))
    found = one.until(lambda update: update.ends and update.gauges and update.gauges.running == 0)
    assert found.gauges.used_blocks == 0


def test_an_engine_that_nobody_listens_to_goes_on_and_says_it_all_later(peer):
    one = peer(lambda tokens: 1, max_model_len=4000, num_blocks=1000, kv="paged")
    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.submit(1, "a", max_tokens=3000, logprobs=20)
    threading.Event().wait(0.3)
    found = one.until(lambda update: update.ends)
    assert len(found.tokens) == 3000 and len(found.steps) == 3000


def test_records_come_while_somebody_watches(peer):
    one = peer(muddled)
    one.send(Watch(True))
    one.submit(1, "ab", max_tokens=3, logit_bias={0: -100.0})
    assert [record.step for record in one.until(lambda update: update.ends).records] == [1, 2, 3]
    one.send(Watch(False))
    one.submit(2, "ab", max_tokens=3)
    assert not one.until(lambda update: update.ends).records


def test_a_timeline_has_waits_and_preemptions(peer):
    one = peer(lambda tokens: 1, num_blocks=6, kv="paged", max_model_len=24, max_num_seqs=2)
    for key in range(1, 4):
        one.submit(key, "abcdefg", max_tokens=12)
    one.until(lambda update: len(update.ends) == 3)
    for number, key in enumerate(range(1, 4)):
        one.send(Ask(number, "timeline", (f"r{key}",)))
    timelines = [answer.value for answer in one.until(lambda update: len(update.answers) == 3).answers]
    happened = [[event["event"] for event in timeline["events"]] for timeline in timelines]
    assert all(events[-1] == "finish" and "admit" in events for events in happened)
    assert any("preempt" in events for events in happened) and any("wait" in events for events in happened)
    assert all(len(timeline["samples"][0]["tokens"]) == 12 for timeline in timelines)
    one.send(Ask(9, "timeline", ("unknown",)))
    assert one.until(lambda update: update.answers).answers[0].value is None
