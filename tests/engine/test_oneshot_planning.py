"""Prefix-aware planning: of requests that begin alike one computes what they share, and the others wait for it."""

from itertools import permutations, product

import pytest

from forge.engine.engine import Engine
from forge.engine.prefix_planner import MAX_DEFERRALS
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Task
from forge.reasons import Deferred
from forge.trace.records import StepRecord
from tests.engine.scripted import letters, run_all
from tests.engine.test_oneshot import ONE, alone, answers, ask, engine_of

PREFIX = "abcdefgh"
"""Two blocks of four."""
TWO = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=3)


def deferred(record: StepRecord) -> dict[int, tuple[int, int]]:
    """Who waits for whom, and over how many tokens."""
    return {
        one.seq_id: (one.reason.owner, one.reason.num_tokens)
        for one in record.waiting
        if isinstance(one.reason, Deferred)
    }


def computed(record: StepRecord) -> dict[int, tuple[int, int]]:
    """By sequence: from where, and how many tokens."""
    return {item.seq_id: (item.start, item.num_tokens) for item in record.items}


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_first_of_those_that_begin_alike_leads_whoever_that_is(order):
    texts = (PREFIX + "i", PREFIX + "jkl", PREFIX + "mnopqr", "zyxwvutsr")
    engine = engine_of()
    names = ask(engine, *(texts[place] for place in order))
    first, second = run_all(engine)

    alike = [seq_id for seq_id, place in enumerate(order) if place != 3]
    leader, *peers = alike
    assert deferred(first) == dict.fromkeys(peers, (leader, 8))
    assert computed(first) == {seq_id: (0, len(texts[order[seq_id]])) for seq_id in (leader, order.index(3))}
    assert computed(second) == {peer: (8, len(texts[order[peer]]) - 8) for peer in peers}
    assert deferred(second) == {}
    assert answers(engine, names) == [alone(texts[place]) for place in order]


@pytest.mark.parametrize(
    "lives", list(product((ONE, TWO), repeat=3)), ids=lambda lives: "".join(str(o.max_tokens) for o in lives)
)
def test_generations_and_requests_that_keep_nothing_lead_each_other(lives):
    texts = [PREFIX + tail for tail in ("ijk", "lmn", "opq")]
    engine = engine_of()
    for place, (text, params) in enumerate(zip(texts, lives, strict=True)):
        engine.add_request(f"r{place}", letters(text), params)
    records = run_all(engine)

    starts = {}
    for record in records:
        for item in record.items:
            starts.setdefault(item.seq_id, item.start)
    assert sorted(starts.values()) == [0, 8, 8], "the prefix is computed once"
    assert answers(engine, ["r0", "r1", "r2"]) == [alone(*pair) for pair in zip(texts, lives, strict=True)]


def test_planning_off_computes_everything_again():
    engine = engine_of(prefix_planning=False)
    names = ask(engine, PREFIX + "i", PREFIX + "j", PREFIX + "k")
    (only,) = run_all(engine)
    assert computed(only) == {0: (0, 9), 1: (0, 9), 2: (0, 9)}
    assert answers(engine, names) == [alone(PREFIX + letter) for letter in "ijk"]


@pytest.mark.parametrize("event", ["the other is aborted", "everything begins again"])
def test_a_prefix_that_no_other_request_waits_for_is_not_published(event):
    engine = engine_of()
    ask(engine, *([PREFIX + "ij", PREFIX + "kl"] if event == "the other is aborted" else [PREFIX + "ij"]))
    if event == "the other is aborted":
        engine.abort("r1")
    else:
        engine.scheduler.restart(list(engine.scheduler.unfinished()), num_finished=0)
    run_all(engine)
    assert engine.cache.stats().cached_blocks == 0


def test_two_prefixes_interleaved_have_a_leader_each():
    other = "zyxwvuts"
    texts = [first + tail for tail in ("ij", "kl", "mn") for first in (PREFIX, other)]
    engine = engine_of()
    names = ask(engine, *texts)
    first, second = run_all(engine)
    assert computed(first) == {0: (0, 10), 1: (0, 10)}
    assert deferred(first) == {2: (0, 8), 3: (1, 8), 4: (0, 8), 5: (1, 8)}
    assert computed(second) == dict.fromkeys((2, 3, 4, 5), (8, 2))
    assert answers(engine, names) == [alone(text) for text in texts]


def test_a_prefix_inside_another_is_published_with_it():
    texts = [PREFIX + "ijkl" + "m", PREFIX + "ijkl" + "n", PREFIX + "opqr"]
    engine = engine_of()
    names = ask(engine, *texts)
    plan = engine.scheduler.schedule()
    assert [one.num_published for one in plan.items] == [12]
    assert [(one.seq_id, one.reason) for one in plan.waiting] == [(1, Deferred(0, 12)), (2, Deferred(0, 8))]
    engine = engine_of()
    names = ask(engine, *texts)
    _, second = run_all(engine)
    assert computed(second) == {1: (12, 1), 2: (8, 4)}
    assert answers(engine, names) == [alone(text) for text in texts]


def test_where_part_of_the_prefix_is_cached_the_leader_computes_the_rest():
    engine = engine_of()
    for place, tail in enumerate(("ijkl", "mnop")):  # two that begin alike, one after the other: it is kept
        engine.add_request(f"warm {place}", letters("abcd" + tail), ONE)
        run_all(engine)
    names = ask(engine, *(PREFIX + "ijkl" + tail for tail in "mno"))
    first, second = run_all(engine)
    assert computed(first) == {2: (4, 9)}
    assert deferred(first) == {3: (2, 8), 4: (2, 8)}
    assert computed(second) == {3: (12, 1), 4: (12, 1)}
    assert answers(engine, names) == [alone(PREFIX + "ijkl" + tail) for tail in "mno"]


def long_leader(engine: Engine, *, length: int = 60) -> str:
    """A generation whose prompt takes many steps, and which others begin like."""
    text = ("abcdefghijklmnopqrstuvwxyz" * 19)[:length]
    engine.add_request("leader", letters(text), TWO)
    return text


def test_a_peer_that_has_waited_often_enough_computes_for_itself():
    engine = engine_of()
    names = ask(engine, PREFIX + "ij", PREFIX + "kl")
    engine.scheduler.queue.sequences[1].times_deferred = MAX_DEFERRALS
    record = engine.step()
    assert (deferred(record), computed(record)) == ({}, {0: (0, 10), 1: (0, 10)})
    assert answers(engine, names) == [alone(PREFIX + "ij"), alone(PREFIX + "kl")]


def test_the_first_tokens_that_a_prompt_in_chunks_leaves_go_to_the_first_that_waits():
    engine = engine_of(max_num_batched_tokens=4, num_blocks=64)
    long_leader(engine)
    (name,) = ask(engine, "xyzzy")
    engine.add_request("later", letters("later"), TWO)
    records = run_all(engine)
    assert [computed(record) for record in records[14:18]] == [
        {0: (56, 4)},
        {0: (60, 1), 1: (0, 3)},
        {1: (3, 2), 2: (0, 2)},
        {2: (2, 3)},
    ]
    assert [one.seq_id for one in records[0].waiting] == [1, 2]
    assert answers(engine, [name]) == [alone("xyzzy")]


def test_later_requests_pass_those_that_wait_and_those_keep_their_places():
    engine = engine_of(prefill_only_tokens=12)
    names = ask(engine, PREFIX + "ij", PREFIX + "kl", PREFIX + "mn", "xy", "zyxwvutsrq")
    records = run_all(engine)
    assert [list(computed(record)) for record in records] == [[0, 3], [1, 2], [4]]
    assert answers(engine, names) == [
        alone(text) for text in (PREFIX + "ij", PREFIX + "kl", PREFIX + "mn", "xy", "zyxwvutsrq")
    ]


def test_when_a_leader_is_aborted_another_leads():
    engine = engine_of(max_num_batched_tokens=20, num_blocks=64)
    text = long_leader(engine)
    names = ask(engine, text[:40] + "aa", text[:40] + "bb", text[:40] + "cc")
    assert computed(engine.step()) == {0: (0, 20)}

    engine.abort("leader")
    second, third = run_all(engine)[-2:]

    assert computed(second) == {1: (20, 22)}, "what the leader had computed is there"
    assert deferred(second) == {2: (1, 20), 3: (1, 20)}
    assert computed(third) == {2: (40, 2), 3: (40, 2)}
    assert answers(engine, names) == [alone(text[:40] + tail * 2) for tail in "abc"]


def test_when_a_leader_that_keeps_nothing_is_aborted_before_its_step_another_leads():
    engine = engine_of()
    names = ask(engine, PREFIX + "i", PREFIX + "j", PREFIX + "k")
    engine.abort("r0")
    first, second = run_all(engine)
    assert computed(first) == {1: (0, 9)} and deferred(first) == {2: (1, 8)}
    assert computed(second) == {2: (8, 1)}
    assert answers(engine, names[1:]) == [alone(PREFIX + letter) for letter in "jk"]


def test_when_the_leaders_step_fails_nothing_is_published_and_another_leads():
    engine = engine_of()
    names = ask(engine, PREFIX + "i", PREFIX + "j", PREFIX + "k")
    forward = engine.model.forward

    def fails(batch, storage):
        engine.model.forward = forward
        forward(batch, storage)
        raise MemoryError

    engine.model.forward = fails
    with pytest.raises(MemoryError):
        engine.step()
    engine.abort("r0", "error")
    assert engine.cache.stats().cached_blocks == 0
    first, second = run_all(engine)
    assert computed(first) == {1: (0, 9)} and computed(second) == {2: (8, 1)}
    assert answers(engine, names[1:]) == [alone(PREFIX + letter) for letter in "jk"]


def test_when_a_leader_is_preempted_its_peers_are_answered_and_it_ends_too():
    engine = engine_of(max_num_batched_tokens=8, num_blocks=14, max_num_seqs=2)
    engine.add_request("old", letters("zyxwvut"), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    text = long_leader(engine, length=46)  # takes all other blocks, and seven steps
    names = ask(engine, text[:40] + "z", text[:40] + "y")
    records = run_all(engine)
    assert any(one.seq_id == 1 for record in records for one in record.preempted), "the leader gives way"
    assert answers(engine, ["leader", *names]) == [alone(text, TWO), alone(text[:40] + "z"), alone(text[:40] + "y")]


def test_a_plan_that_has_become_stale_is_made_anew():
    engine = engine_of(num_blocks=12, prefill_only_tokens=12)
    names = ask(engine, PREFIX + "i", PREFIX + "jklmnopqrst", PREFIX + "u")
    engine.step()
    assert engine.cache.stats().cached_blocks == 2
    engine.add_request("big", letters("zyxwvutsrqponmlkjihgfedcba" + "zyxwvutsrqponmlkji"), TWO)  # eleven of twelve
    records = run_all(engine)
    assert engine.cache.stats().evictions >= 1
    assert records
    assert answers(engine, names) == [alone(PREFIX + tail) for tail in ("i", "jklmnopqrst", "u")]


def test_a_prefix_that_finds_no_block_is_computed_and_not_published():
    engine = engine_of(num_blocks=2, max_model_len=16)
    names = ask(engine, *("abcde" + tail for tail in "fgh"))
    engine.add_request("g", letters("zyxwvuts"), SamplingParams(max_tokens=1, ignore_eos=True), retain_cache=True)
    records = run_all(engine)
    assert len(records) <= 4
    assert answers(engine, names) == [alone("abcde" + tail, max_model_len=16) for tail in "fgh"]


def test_labels_of_several_tokens_share_the_prompt():
    engine = engine_of()
    for place, label in enumerate(("xy", "xz", "yyy")):
        task = Task(score_from=10)
        engine.add_request(f"r{place}", letters("abcdefghij" + label), SamplingParams(), task=task)
    first, second = run_all(engine)
    assert computed(first) == {0: (0, 12)}
    assert computed(second) == {1: (8, 4), 2: (8, 5)}
