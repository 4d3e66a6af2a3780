"""Runs of a scripted model in a small pool, recorded: arrivals over time, preemption, samples, a refusal, an abort."""

from dataclasses import dataclass
from pathlib import Path

from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError
from forge.trace.recorder import Trace, TraceHeader, TraceWriter
from forge.trace.records import EndRecord, StepRecord
from tests.engine.scripted import muddled, new_engine

HEADER = TraceHeader("scripted", "paged", "cpu", "by hand", 3, 16)


@dataclass(frozen=True)
class Recorded:
    steps: tuple[StepRecord, ...]
    ends: tuple[EndRecord, ...]
    outputs: dict[str, RequestOutput]


def crowded(mode: str = "recompute", kv: str = "paged", n: int = 1, requests: int = 6) -> Recorded:
    """Six requests (or so) for three places and eight blocks of two; a seventh is too large, an eighth is aborted."""
    engine = new_engine(
        muddled, kv=kv, max_num_seqs=3, block_size=2, num_blocks=8, max_num_batched_tokens=6, preemption=mode
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=n, temperature=float(n > 1), seed=1)
    for number in range(requests // 2):
        engine.add_request(f"early-{number}", list(range(1, 5 + number)), params)
    engine.add_request("aborted", [1, 2, 3], params)
    try:
        engine.add_request("huge", [1] * 99, params)
    except UsageError:
        pass
    steps = [engine.step() for _ in range(3)]
    engine.abort("aborted")
    for number in range(requests - requests // 2):
        engine.add_request(f"late-{number}", list(range(4, 8)), params)
    while engine.has_unfinished():
        steps.append(engine.step())
    return Recorded(tuple(steps), *_ends(engine))


def _ends(engine: Engine) -> tuple[tuple[EndRecord, ...], dict[str, RequestOutput]]:
    outputs = {request_id: engine.output(request_id) for request_id in engine._requests}
    ends = [
        EndRecord(
            name,
            tuple(one.finish_reason for one in output.outputs),
            tuple(one.metrics for one in output.outputs),
        )
        for name, output in outputs.items()
    ]
    return tuple(ends), outputs


def write_trace(path: Path, trace: Trace) -> None:
    """Write a whole trace at once, steps first."""
    with TraceWriter(path) as writer:
        writer.begin(trace.header)
        for step in trace.steps:
            writer.write(step)
        for end in trace.ends:
            writer.write(end)
