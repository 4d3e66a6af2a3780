"""Policies of your own: which request is admitted first, and which gives way when memory runs out."""

from collections.abc import Sequence as Items

from forge import LLM, SamplingParams
from forge.engine.sequence import Sequence
from forge.testing import check_victim_policy


def shortest_first(sequence: Sequence) -> tuple:
    """A key: of two that wait, the smaller one is admitted first. Here: the shorter prompt, of equals the older."""
    return sequence.num_prompt_tokens, sequence.arrival


def longest(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Of those that run, the one with the most tokens: its blocks help the most. Never the one that asks."""
    candidates = [sequence for sequence in running if sequence is not requester]
    return max(candidates, key=lambda sequence: len(sequence.token_ids), default=None)


check_victim_policy(longest)  # in pools that are too small every request ends, and says what it says alone
llm = LLM("tales", kv="paged", num_blocks=24, order=shortest_first, preempt=longest)
run = llm.start(["Once upon a time"] * 8, SamplingParams(max_tokens=64, ignore_eos=True))
for step in run:
    for lost in step.preempted:
        print(f"step {step.step}: {lost.seq_id} gives way to {lost.victim_of} ({lost.preempt})")
