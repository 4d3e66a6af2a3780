"""Whether a policy lets every request end with the tokens that it would have alone."""

from forge.engine.policies import VictimPolicy
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM

_MOST_STEPS = 5_000
"""More than that is going round in circles."""


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
