"""A recorded run as a workload: when its requests arrived, how long their prompts and outputs were.

A trace has no texts (`forge.trace.recorder`), so the prompts are cut from the passage that made-up ones are of.
"""

from pathlib import Path
from typing import NamedTuple

from forge.errors import UsageError
from forge.trace.recorder import read_trace
from forge.workload.requests import Encoder, Request, Workload, passage_prompts


class RecordedRequest(NamedTuple):
    """One sample of a recorded request."""

    arrival: float
    """Seconds after the first."""
    prompt_tokens: int
    output_tokens: int
    """As many as it got; at most, where it had not ended when the record did."""
    priority: int


def recorded_requests(path: Path) -> tuple[RecordedRequest, ...]:
    """The requests of a trace in the order of their arrival, one for each sample.

    Raises `UsageError` for a file that is not there or has no request that arrived in it, `TraceError` for one that is
    no trace.
    """
    steps = read_trace(path).steps
    ended = {finish.seq_id for step in steps for finish in step.finished}
    outputs: dict[int, int] = {}
    for step in steps:
        for token in step.tokens:
            outputs[token.seq_id] = outputs.get(token.seq_id, 0) + 1
    arrivals = [arrival for step in steps for arrival in step.arrived]
    if not arrivals:
        raise UsageError(f"{path}: no request arrived in this record: record a run from its beginning")
    began = min(arrival.arrived for arrival in arrivals)
    requests = [
        RecordedRequest(
            arrival.arrived - began,
            arrival.num_prompt_tokens,
            max(1, outputs.get(seq_id, 0) if seq_id in ended else arrival.max_output_tokens),
            arrival.priority,
        )
        for arrival in arrivals
        for seq_id in arrival.seq_ids
    ]
    return tuple(sorted(requests, key=lambda request: request.arrival))


def recorded_workload(path: Path, tokenizer: Encoder, seed: int = 0) -> Workload:
    """The workload of a trace: its arrivals, by the clock on the wall, its lengths and its priorities. seed: where in
    the passage each prompt begins. Raises what `recorded_requests` does."""
    recorded = recorded_requests(path)
    prompts = passage_prompts(tokenizer, [request.prompt_tokens for request in recorded], seed)
    return Workload(
        tuple(
            Request(prompt, request.output_tokens, request.arrival, request.priority)
            for prompt, request in zip(prompts, recorded, strict=True)
        )
    )
