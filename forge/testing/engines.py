"""What plugs into an engine: whether a victim policy lets every request end with the tokens that it would have alone,
and whether a proposer keeps the rules (its draft tokens follow from a request's tokens and change none of the
text).
"""

from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np

from forge.engine.policies import VictimPolicy
from forge.engine.proposer import Proposal, ProposalRequest, Proposer
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.model.model import Draw

_MOST_STEPS = 5_000
"""Steps at most; an engine that needs more is going round in circles."""


def check_victim_policy(policy: VictimPolicy) -> None:
    """Raise AssertionError if, in pools that are too small, a request does not end, or says something else.

    The requests are run by the hash model in pools of several sizes, with every invariant checked after each step.
    """
    prompts = [[97 + number] * (3 + 5 * number % 23) for number in range(12)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    alone = LLM("hash", kv="off", max_num_seqs=1).generate(prompts, params)
    expected = [output.outputs[0].token_ids for output in alone]
    for num_blocks in (14, 20, 33):
        for preemption in ("recompute", "swap"):
            llm = LLM("hash", kv="paged", block_size=4, num_blocks=num_blocks, preempt=policy, preemption=preemption)
            where = f"in a pool of {num_blocks} blocks ({preemption})"
            run, preempted = llm.start(prompts, params), 0
            for steps, record in enumerate(run):
                preempted += len(record.preempted)
                llm.engine.scheduler.check_invariants()
                assert steps < _MOST_STEPS, f"{where} {_MOST_STEPS} steps were not enough: work goes round in circles"
            assert preempted, f"{where} no sequence was preempted, so the policy was never asked"
            tokens = [output.outputs[0].token_ids for output in run.outputs]
            assert tokens == expected, f"{where} a preemption changed what is said"


def check_proposer(
    new_proposer: Callable[[], Proposer], texts: Sequence[Sequence[int]] = (), reuses_ids: bool = True
) -> None:
    """Raise AssertionError, saying which, if a proposer breaks a promise of its seam.

    texts: token ids after which it has a proposal, beside random ones. reuses_ids: whether the same sequence id may
    come with another text, as it does after a restart of the engine.
    """
    proposer, rng = new_proposer(), np.random.default_rng(0)
    texts = [list(text) for text in texts] + [rng.integers(97, 101, length).tolist() for length in (1, 2, 9, 30)]
    for number, text in enumerate(texts):
        for k in (0, 1, 4, 9):
            _check_answer(proposer, text, k, number)
    for number in range(len(texts)):
        _check_alone(proposer, new_proposer, texts, number, reuses_ids)
    _check_text(new_proposer)


def _request(text: Sequence[int], k: int, seq_id: int) -> ProposalRequest:
    return ProposalRequest(seq_id, Draw(SamplingParams(), 0, 0, text), k)


def _check_answer(proposer: Proposer, text: list[int], k: int, seq_id: int) -> None:
    before = list(text)
    proposals = proposer.propose([_request(text, k, seq_id)])
    assert len(proposals) == 1 and isinstance(proposals[0], Proposal), f"one request, and the answer is {proposals}"
    (proposal,) = proposals
    assert text == before, "it changed the tokens of the request, which are the caller's own"
    assert len(proposal) <= k, f"asked for {k} tokens at most, it proposed {len(proposal)}: {proposal.token_ids}"
    token_ids = proposal.token_ids
    assert all(isinstance(token_id, Integral) for token_id in token_ids), f"not token ids: {token_ids}"
    for token_id, distribution in zip(token_ids, proposal.distributions or (), strict=False):
        odds = distribution.probability(token_id)
        assert odds > 0, f"it proposed token {token_id} and says that it could not have been drawn"


def _check_alone(
    proposer: Proposer, new_proposer: Callable[[], Proposer], texts: list[list[int]], number: int, reuses_ids: bool
) -> None:
    """Propose beside others, anew, after forgetting, and for an id that had another text: the proposal is the same."""
    text = texts[number]
    (expected,) = new_proposer().propose([_request(text, 4, number)])
    beside = proposer.propose([_request(text, 4, seq_id) for seq_id, text in enumerate(texts)])
    assert len(beside) == len(texts), f"{len(texts)} requests, and {len(beside)} proposals"
    subject = f"after a text of {len(text)} tokens it proposes {expected.token_ids} when new and asked for it alone"
    assert beside[number].token_ids == expected.token_ids, f"{subject}, beside others {beside[number].token_ids}"
    for seq_id in (number, number + 1) if reuses_ids else (number,):
        (again,) = proposer.propose([_request(text, 4, seq_id)])
        assert again.token_ids == expected.token_ids, f"{subject}, for an id of another text {again.token_ids}"
    proposer.forget(number)
    proposer.forget(number)
    (again,) = proposer.propose([_request(text, 4, number)])
    assert again.token_ids == expected.token_ids, f"{subject}, after forgetting it {again.token_ids}"


def _check_text(new_proposer: Callable[[], Proposer]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = ["Once upon a time", "ab ab ab ab", "a"]
    plain = LLM("hash", kv="paged").generate(prompts, params)
    drafted = LLM("hash", kv="paged", speculate=new_proposer(), speculate_fixed=True).generate(prompts, params)
    for output, drafted_output in zip(plain, drafted, strict=True):
        ours, theirs = output.outputs[0].token_ids, drafted_output.outputs[0].token_ids
        assert ours == theirs, (
            f"after {output.prompt!r} the text with its draft tokens is another: {theirs} and not {ours}"
        )
