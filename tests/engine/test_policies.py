"""Each policy chooses by what its description says, and a configuration without a meaning is refused by its option."""

from types import SimpleNamespace

import pytest

from forge.engine.policies import (
    ADMISSION_ORDERS,
    SchedulerConfig,
    least_progressed,
    lifo,
    lifo_others,
    worst_placed,
)
from forge.errors import UsageError
from forge.reasons import AGING_TOKENS


def sequence(seq_id: int, *, arrival: int = 0, priority: int = 0, prompt: int = 1, most: int = 1, output: int = 0):
    """What policies look at of a sequence."""
    return SimpleNamespace(
        seq_id=seq_id,
        arrival=arrival,
        priority=priority,
        num_prompt_tokens=prompt,
        max_output_tokens=most,
        num_output_tokens=output,
    )


@pytest.mark.parametrize(
    ("order", "admitted"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("priority", [2, 0, 1, 3]),
        ("sjf", [2, 3, 1, 0]),
        ("sjf-aged", [1, 0, 2, 3]),
    ],
)
def test_an_order_admits_by_its_key(order, admitted):
    waiting = [
        sequence(0, arrival=0, prompt=AGING_TOKENS, most=AGING_TOKENS),
        sequence(1, arrival=1, prompt=AGING_TOKENS // 2),
        sequence(2, arrival=2, priority=-1),
        sequence(3, arrival=3, prompt=1, most=AGING_TOKENS // 4),
    ]
    key = ADMISSION_ORDERS[order]
    assert [chosen.seq_id for chosen in sorted(waiting, key=key)] == admitted


def test_lifo_preempts_the_newest_even_if_it_asks_and_none_that_runs_alone():
    running = [sequence(0), sequence(1), sequence(2)]
    assert lifo(running, running[2]) is lifo(running, running[0]) is running[2]
    assert lifo(running[:2], running[0]) is running[1] and lifo(running[:1], running[0]) is None


def test_lifo_others_preempts_the_newest_that_does_not_ask():
    running = [sequence(0), sequence(1), sequence(2)]
    assert lifo_others(running, running[2]) is running[1] and lifo_others(running, running[0]) is running[2]
    assert lifo_others(running[:1], running[0]) is None


def test_least_progressed_preempts_the_fewest_output_tokens_of_equals_the_newest_and_never_the_requester():
    running = [
        sequence(0, arrival=0, output=2),
        sequence(1, arrival=1, output=1),
        sequence(2, arrival=2, output=1),
        sequence(3, arrival=2, output=1),
    ]
    assert least_progressed(running, running[0]) is running[3], "of one request's samples the later one"
    assert least_progressed(running, running[3]) is running[2], "of equals the one that arrived last"
    assert least_progressed(running[:2], running[1]) is running[0]
    assert least_progressed(running[:1], running[0]) is None


def test_priority_preempts_the_one_that_it_would_serve_last():
    running = [
        sequence(0, arrival=3, priority=0),
        sequence(1, arrival=1, priority=1),
        sequence(2, arrival=2, priority=1),
        sequence(3, arrival=2, priority=1),
    ]
    assert worst_placed(running, running[0]) is running[3]
    assert worst_placed(running[:2], running[0]) is running[1]
    assert worst_placed(running[:1], running[0]) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs must be a whole number of at least 1, got 0"),
        ({"max_num_seqs": None}, "--max-num-seqs must be a whole number of at least 1, got None"),
        ({"max_num_seqs": True}, "--max-num-seqs must be a whole number of at least 1, got True"),
        ({"max_num_batched_tokens": 1.5}, "--max-num-batched-tokens must be a whole number of at least 1, got 1.5"),
        ({"prefill_only_tokens": 0}, "--prefill-only-tokens must be a whole number of at least 1, got 0"),
        ({"prefill_only_memory": "1"}, "--prefill-only-memory must be a whole number of at least 1, got '1'"),
        ({"num_host_blocks": -1}, "--num-host-blocks must be a whole number of at least 0, got -1"),
        ({"order": "best"}, "unknown --order 'best'; supported: fcfs, priority, sjf, sjf-aged"),
        ({"preempt": "none"}, "unknown --preempt 'none'; supported: lifo, lifo-others, least-progressed"),
        ({"preemption": len}, "unknown --preemption <built-in function len>; supported: recompute, swap"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "--max-num-batched-tokens 3 leaves some of 4 sequences"),
    ],
    ids=str,
)
def test_a_configuration_without_a_meaning_is_refused_by_its_option(values, message):
    with pytest.raises(UsageError) as raised:
        SchedulerConfig(**values)
    assert str(raised.value).startswith(message)


def test_a_step_has_room_for_a_token_of_every_sequence():
    assert SchedulerConfig().token_budget == 512
    assert SchedulerConfig(max_num_seqs=600).token_budget == 600
    assert SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=4).token_budget == 4
    default = SchedulerConfig()
    assert (default.max_num_seqs, default.prefill_only_tokens, default.prefill_only_memory) == (16, 2048, 256 << 20)
    assert default.chunked_prefill and default.prefix_planning and default.prefill_only
    assert (default.num_host_blocks, default.order, default.preemption) == (256, "fcfs", "recompute")
    assert SchedulerConfig(num_host_blocks=0, max_num_seqs=1, prefill_only_tokens=1, prefill_only_memory=1)


def test_a_policy_is_a_name_or_a_function_and_priority_has_its_own():
    assert SchedulerConfig().victim_policy == ("lifo", lifo)
    assert SchedulerConfig(preempt=lifo_others).victim_policy == ("lifo-others", lifo_others)
    assert SchedulerConfig(order="priority").victim_policy == ("priority", worst_placed)
    order = ADMISSION_ORDERS["sjf"]
    assert SchedulerConfig(order=order).order_name == "shortest-job-first"
    assert SchedulerConfig(order=order).admission_order is SchedulerConfig(order="sjf").admission_order is order
