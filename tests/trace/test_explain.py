"""Every reason has its words, in a step's line and in the account of a request."""

from dataclasses import replace
from typing import get_args

import pytest

from forge.reasons import (
    Deferred,
    FinishReason,
    HostPoolFull,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    PoolExhausted,
    PreemptionMode,
    WaitReason,
)
from forge.trace.explain import (
    Reason,
    explain,
    explain_admission,
    explain_finish,
    explain_preempted,
    explain_preemption,
    explain_request,
    explain_wait,
)
from forge.trace.records import AdmitRecord, FinishRecord, PreemptRecord, WaitRecord
from forge.trace.timeline import Cause, Wait, timeline_of
from tests.trace.runs import crowded
from tests.trace.test_timeline import step

IN_A_STEP = {
    NoBlocks(8, 2): "no_blocks: needs 8, free 2",
    MaxNumSeqs(16): "max_num_seqs: 16 run",
    NoBudget(512): "budget: too few of the step's 512 tokens are left",
    NoBudget(2048, "prefill_only_tokens"): "budget: too few of the step's 2,048 prefill-only tokens are left",
    NoBudget(64, "prefill_only_memory"): "budget: too few of the step's 64 bytes for prefill-only requests are left",
    Deferred(4, 48): "deferred: seq 4 computes the same 48-token prefix",
    HostPoolFull(3, 1): "no swap: needs 3 host blocks, free 1",
    PoolExhausted(32): "the pool holds 32 tokens",
}
OF_A_WAIT = {
    NoBlocks(8, 1): "it needed 8 blocks and 1 was free",
    MaxNumSeqs(16): "16 sequences ran, the limit (--max-num-seqs)",
    NoBudget(512): "other sequences had the step's 512 tokens (--max-num-batched-tokens)",
    NoBudget(2048, "prefill_only_tokens"): (
        "other sequences had the step's 2,048 prefill-only tokens (--prefill-only-tokens)"
    ),
    NoBudget(64, "prefill_only_memory"): (
        "other sequences had the step's 64 bytes for prefill-only requests (--prefill-only-memory)"
    ),
    Deferred(4, 48): "deferred while seq 4 computed the same 48-token prefix",
}
LOST = PreemptRecord(1, 12, 1, 0, "lifo", "recompute", 37, 3)


def wait(*causes: Cause, **fields) -> Wait:
    return replace(Wait(1, 0.0, None, 12, 0.031, causes, ended=True), **fields)


def test_no_reason_is_missing():
    assert {type(reason) for reason in IN_A_STEP} == set(get_args(Reason))
    assert {type(reason) for reason in OF_A_WAIT} == set(get_args(WaitReason))


@pytest.mark.parametrize("reason", IN_A_STEP, ids=lambda reason: type(reason).__name__)
def test_a_reason_in_a_step(reason):
    assert explain(reason) == IN_A_STEP[reason]


@pytest.mark.parametrize("reason", OF_A_WAIT, ids=lambda reason: type(reason).__name__)
def test_a_reason_of_a_wait(reason):
    assert explain_wait(wait(Cause(reason, 7, 12)), 7) == f"waited 12 steps (31.0 ms): {OF_A_WAIT[reason]}"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (Cause(NoBlocks(7, 6), 8, 12), "queued behind seq 8, which needed 7 blocks and 6 were free"),
        (
            Cause(NoBlocks(1, 0), 8, 12, others_before=True),
            "queued behind other requests; the last, seq 8, needed 1 block and 0 were free",
        ),
        (Cause(MaxNumSeqs(2), 8, 12), "queued behind seq 8; 2 sequences ran, the limit (--max-num-seqs)"),
        (
            Cause(MaxNumSeqs(2), 8, 12, others_before=True),
            "queued behind other requests; 2 sequences ran, the limit (--max-num-seqs)",
        ),
    ],
)
def test_a_wait_behind_another_sequence(cause, said):
    assert explain_wait(wait(cause), 9) == f"waited 12 steps (31.0 ms): {said}"


def test_each_part_of_a_wait_has_its_steps():
    told = wait(Cause(NoBlocks(8, 2), 1, 11), Cause(MaxNumSeqs(3), 2, 1), preemption=LOST, ended=False)
    assert explain_wait(told, 2) == (
        "has waited again 12 steps (31.0 ms): for 11 steps queued behind seq 1, which needed 8 blocks and 2 were free; "
        "for 1 step 3 sequences ran, the limit (--max-num-seqs)"
    )
    assert explain_wait(wait(), 2) == "waited 12 steps (31.0 ms)"


@pytest.mark.parametrize(
    ("admission", "said"),
    [
        (AdmitRecord(1, "new", 0, 6), "6 blocks"),
        (AdmitRecord(1, "new", 32, 6), "6 blocks; 32 tokens from the cache"),
        (AdmitRecord(1, "recompute", 32, 1), "again, to be recomputed, 1 block; 32 tokens from the cache"),
        (AdmitRecord(1, "swap", 9, 1), "again, 1 block; 9 tokens back from the host's pool"),
    ],
)
def test_an_admission(admission, said):
    assert explain_admission(admission) == said


def test_a_preemption_in_its_step():
    assert {"recompute", "swap"} == set(get_args(PreemptionMode))
    assert explain_preemption(LOST) == "victim of seq 12: needed 1, free 0; lifo; 37 tokens to recompute"
    swapped = replace(LOST, preemption="swap", victim_of=1)
    assert explain_preemption(swapped) == "its own victim: needed 1, free 0; lifo; 3 blocks to the host's pool"
    full = replace(LOST, fallback=HostPoolFull(3, 1))
    assert explain_preemption(full).endswith("; 37 tokens to recompute (no swap: needs 3 host blocks, free 1)")
    assert explain_preemption(LOST, lambda seq_id: f"story {seq_id}").startswith("victim of story 12: ")


@pytest.mark.parametrize(
    ("lost", "recomputed", "said"),
    [
        (LOST, 37, "37 tokens recomputed"),
        (LOST, 5, "37 tokens lost, 5 recomputed"),
        (replace(LOST, tokens_lost=0), 0, "no token had been computed"),
        (replace(LOST, preemption="swap"), 0, "swapped to the host's pool, no token recomputed"),
    ],
)
def test_what_a_preemption_cost(lost, recomputed, said):
    preempted = wait(first_step=40, preemption=lost, tokens_recomputed=recomputed)
    assert explain_preempted(preempted) == f"preempted at step 40, victim of seq 12: needed 1, free 0; lifo; {said}"


@pytest.mark.parametrize(
    ("finish", "said"),
    [
        (FinishRecord(1, "stop"), "stop"),
        (FinishRecord(1, "stop", stop="\x1b[2J"), r"stop at '\x1b[2J'"),
        (FinishRecord(1, "stop", stop=7), "stop at token 7"),
        (FinishRecord(1, "length"), "length"),
        (FinishRecord(1, "length", why=PoolExhausted(32)), "length: the pool holds 32 tokens"),
        (FinishRecord(1, "abort"), "abort"),
        (FinishRecord(1, "error"), "error"),
        (FinishRecord(1, "error", error="the model is gone"), "error: the model is gone"),
    ],
)
def test_an_end(finish, said):
    assert explain_finish(finish) == said


def test_every_end_is_told():
    for reason in get_args(FinishReason):
        assert explain_finish(FinishRecord(1, reason)) == reason


def test_the_account_of_a_request_is_in_order():
    steps = [
        step(1, (0, 1), arrived=(0, 1)),
        step(2, (0,), preempted=(replace(LOST, victim_of=0),)),
        step(3, (0,), waiting=(WaitRecord(1, NoBlocks(3, 0)),)),
        step(4, (1,), admitted=(AdmitRecord(1, "recompute", 0, 3),)),
    ]
    ended = replace(step(5, (1,)), finished=(FinishRecord(1, "length", why=PoolExhausted(32)),))
    assert explain_request(timeline_of([*steps, ended]).request(1)) == (
        "preempted at step 2, victim of seq 0: needed 1, free 0; lifo; 37 tokens recomputed",
        "waited again 2 steps (2,000.0 ms): it needed 3 blocks and 0 were free",
        "ended: length: the pool holds 32 tokens",
    )
    assert explain_request(timeline_of(steps).request(0)) == ()


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_whatever_happens_can_be_told(mode, kv):
    run = crowded(mode, kv, 2, 10)
    lines = [line for one in timeline_of(run.steps, run.ends).requests() for line in explain_request(one)]
    assert any(line.startswith("preempted at step") for line in lines)
    assert kv == "paged" or any("deferred while seq" in line for line in lines)
    assert not any("None" in line for line in lines)
