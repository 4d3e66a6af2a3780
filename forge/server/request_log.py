"""What happened to each request, step by step: the answer to "why was this one slow?".

The book notes what is rare (an admission, a wait, a preemption, an end), so it costs a step next to nothing; what every
forward cost a request is in its metrics already. Of requests that have ended the last few are kept.
"""

from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from forge.engine.outputs import RequestOutput
from forge.trace.records import (
    AdmitRecord,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    PreemptRecord,
    RequestMetrics,
    StepRecord,
    WaitReason,
)

MAX_ENDED = 256
"""Ended requests that are remembered."""


class _Life:
    def __init__(self, seq_ids: tuple[int, ...], num_prompt_tokens: int):
        self.seq_ids = seq_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.events: list[dict[str, Any]] = []
        self.metrics: tuple[RequestMetrics, ...] = ()
        self.reasons: list[str] = []
        self.tokens: list[tuple[int, int, float]] = []
        """(sample, step, milliseconds of the step) of each output token."""

    def add(self, step: int, seq_id: int, event: str, why: str, **facts: Any) -> None:
        sample = self.seq_ids.index(seq_id)
        last = self.events[-1] if self.events else None
        if event == "wait" and last is not None and (last["event"], last["sample"]) == (event, sample):
            last |= {"until_step": step, "why": why} | facts
            return
        until = {"until_step": step} if event == "wait" else {}
        self.events.append({"step": step, **until, "sample": sample, "event": event, "why": why} | facts)


class LifeBook:
    def __init__(self):
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._of: dict[int, _Life] = {}

    def begin(self, request_id: str, seq_ids: tuple[int, ...], num_prompt_tokens: int) -> None:
        life = self._lives[request_id] = _Life(seq_ids, num_prompt_tokens)
        self._of.update(dict.fromkeys(seq_ids, life))

    def seq_ids(self, request_id: str) -> tuple[int, ...]:
        return self._lives[request_id].seq_ids

    def note(self, record: StepRecord) -> None:
        """Take in a step."""
        step, of = record.step, self._of
        for admission in record.admitted:
            if admission.seq_id in of:
                facts = {"num_cached": admission.num_cached, "num_blocks": admission.num_blocks}
                of[admission.seq_id].add(step, admission.seq_id, "admit", admission_line(admission), **facts)
        for wait in record.waiting:
            if wait.seq_id in of:
                of[wait.seq_id].add(step, wait.seq_id, "wait", wait_line(wait.reason), reason=asdict(wait.reason))
        for loss in record.preempted:
            if loss.seq_id in of:
                of[loss.seq_id].add(step, loss.seq_id, "preempt", preemption_line(loss), tokens_lost=loss.tokens_lost)
        milliseconds = (record.ended - record.started) * 1e3
        for token in record.tokens:
            life = of.get(token.seq_id)
            if life is not None:
                life.tokens.append((life.seq_ids.index(token.seq_id), step, milliseconds))
        for finish in record.finished:
            if finish.seq_id in of:
                of[finish.seq_id].add(step, finish.seq_id, "finish", f"ends: {finish.reason}")

    def end(self, request_id: str, output: RequestOutput) -> None:
        """A request has ended: its metrics are final."""
        life = self._lives[request_id]
        life.metrics = tuple(sample.metrics for sample in output.outputs)
        life.reasons = [sample.finish_reason for sample in output.outputs]
        for seq_id in life.seq_ids:
            del self._of[seq_id]
        self._ended[request_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._lives[self._ended.popitem(last=False)[0]]

    def life(self, request_id: str, output: RequestOutput | None = None) -> dict[str, Any] | None:
        """A request's life so far; None for one that is not known. `output` is that of one which has not ended."""
        life = self._lives.get(request_id)
        if life is None:
            return None
        metrics = tuple(sample.metrics for sample in output.outputs) if output is not None else life.metrics
        return {
            "request_id": request_id,
            "state": "ended" if request_id in self._ended else "unfinished",
            "finish_reasons": life.reasons,
            "num_prompt_tokens": life.num_prompt_tokens,
            "events": life.events,
            "samples": [_sample_object(one, index, life.tokens) for index, one in enumerate(metrics)],
        }


def _sample_object(metrics: RequestMetrics, index: int, tokens: list[tuple[int, int, float]]) -> dict[str, Any]:
    return {
        "index": index,
        "num_output_tokens": metrics.num_output_tokens,
        "queue_ms": metrics.queue_ms,
        "time_to_first_token_ms": metrics.time_to_first_token_ms,
        "time_per_output_token_ms": metrics.time_per_output_token_ms,
        "end_to_end_ms": metrics.end_to_end_ms,
        "tokens_cached": metrics.tokens_cached,
        "tokens_recomputed": metrics.tokens_recomputed,
        "times_preempted": metrics.times_preempted,
        "forwards": [
            {"tokens": num_tokens, "milliseconds": milliseconds}
            for num_tokens, milliseconds in zip(metrics.forward_tokens, metrics.forward_ms, strict=True)
        ],
        "tokens": [
            {"step": step, "milliseconds": milliseconds} for sample, step, milliseconds in tokens if sample == index
        ],
    }


def admission_line(admission: AdmitRecord) -> str:
    again = {"new": "", "recompute": " again, to be computed again", "swap": " again, from the host's pool"}
    cached = f", {admission.num_cached} tokens cached" if admission.num_cached else ""
    return f"admitted{again[admission.how]}: takes {admission.num_blocks} blocks{cached}"


def wait_line(reason: WaitReason) -> str:
    match reason:
        case NoBlocks(needed, free):
            return f"waits: needs {needed} blocks, {free} free"
        case MaxNumSeqs(limit):
            return f"waits: {limit} sequences run, as many as may"
        case NoBudget(limit):
            return f"waits: the step's {limit} tokens are given to others"


def preemption_line(loss: PreemptRecord) -> str:
    return (
        f"preempted ({loss.policy}): sequence {loss.victim_of} needed {loss.needed} blocks, {loss.free} free; "
        f"{loss.tokens_lost} tokens lost, {loss.blocks_freed} blocks freed"
    )
