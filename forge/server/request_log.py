"""What happened to each request, step by step, for `/debug`: the answer to "why was this one slow?".

A thin layer over `Timeline`, which reads the steps, and `explain`, which puts the reasons into words: it knows requests
by name, and keeps the last few that have ended.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count, groupby, takewhile
from typing import Any

from forge.server.messages import prompt_id
from forge.trace.explain import explain_admission, explain_finish, explain_preempted, explain_wait
from forge.trace.records import DraftCycle
from forge.trace.speculation_summary import DraftTotals, add_cycles
from forge.trace.timeline import RequestTimeline, Timeline
from forge.views.json_output import as_object, picked, plain

MAX_ENDED = 256
"""Ended requests that are kept."""
Event = dict[str, Any]


class RequestLog:
    """The timelines of the requests that run, and of the last `MAX_ENDED` that have ended, as JSON values."""

    def __init__(self, timeline: Timeline):
        """timeline: the engine's own."""
        self._timeline = timeline
        self._seq_ids: dict[str, tuple[int, ...]] = {}
        """The sequence ids of each request that has been added and not yet pushed out by later ones."""
        self._ended: OrderedDict[str, tuple[RequestTimeline, ...]] = OrderedDict()
        """The timelines of its samples, of each request that has ended."""

    def begin(self, request_id: str, seq_ids: tuple[int, ...]) -> None:
        """Enter a request that was added to the engine."""
        self._ended.pop(request_id, None)
        self._seq_ids[request_id] = seq_ids

    def end(self, request_id: str) -> None:
        """Keep the timeline of a request that has ended, before the engine forgets it."""
        self._ended[request_id] = self._timelines(request_id)
        if len(self._ended) > MAX_ENDED:
            del self._seq_ids[self._ended.popitem(last=False)[0]]

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """Return what happened to a request so far; None for one that is not known. A request of several prompts is
        known by the id of the whole; its prompts have ids of their own, which end in `-0`, `-1` and so on."""
        names = [request_id]
        if request_id not in self._seq_ids:
            names = list(takewhile(self._seq_ids.__contains__, (prompt_id(request_id, index) for index in count())))
        if not names:
            return None
        ended = all(name in self._ended for name in names)
        return _request_object(request_id, [self._timelines(name) for name in names], ended)

    def _timelines(self, request_id: str) -> tuple[RequestTimeline, ...]:
        if request_id in self._ended:
            return self._ended[request_id]
        return tuple([self._timeline.request(seq_id) for seq_id in self._seq_ids[request_id]])


def _request_object(request_id: str, prompts: list[tuple[RequestTimeline, ...]], ended: bool) -> dict[str, Any]:
    """Describe a request. Samples are numbered as the choices of the answer are: those of the first prompt, those of
    the second, …"""
    samples = [sample for prompt in prompts for sample in prompt]
    events = [event for index, sample in enumerate(samples) for event in _events(sample, index)]
    return {
        "request_id": request_id,
        "state": "ended" if ended else "unfinished",
        "finish_reasons": [sample.finish_reason for sample in samples if sample.finish_reason is not None],
        "num_prompt_tokens": sum([prompt[0].num_prompt_tokens or 0 for prompt in prompts]),
        "events": sorted(events, key=lambda event: event["step"]),
        "samples": [_sample_object(sample, index) for index, sample in enumerate(samples)],
    }


def _events(request: RequestTimeline, sample: int) -> list[Event]:
    """Return a sample's waits, admissions, preemptions and its end; in each step in the order in which they happen."""
    events: list[Event] = []

    def tell(step: int, event: str, why: str, **facts: Any) -> None:
        events.append({"step": step, "sample": sample, "event": event, "why": why} | facts)

    for wait in request.waits:
        if wait.preemption is not None:
            tell(wait.first_step, "preempt", explain_preempted(wait), tokens_lost=wait.preemption.tokens_lost)
        reason = as_object(wait.causes[-1].reason) if wait.causes else None
        until = wait.first_step + wait.num_steps - 1
        tell(wait.first_step, "wait", explain_wait(wait, request.seq_id), until_step=until, reason=reason)
    for step, admission in request.admissions:
        facts = {"num_cached": admission.num_cached, "num_blocks": admission.num_blocks}
        tell(step, "admit", f"admitted: {explain_admission(admission)}", **facts)
    if request.finish is not None and request.finished_step is not None:
        tell(request.finished_step, "finish", f"ended: {explain_finish(request.finish)}")
    return events


def _draft_totals(cycles: Sequence[DraftCycle]) -> list[DraftTotals]:
    totals: dict[str, DraftTotals] = {}
    for _, step in groupby(cycles, key=lambda cycle: cycle.step):
        add_cycles(totals, list(step))
    return list(totals.values())


def _sample_object(request: RequestTimeline, index: int) -> dict[str, Any]:
    times = ("queue_ms", "time_to_first_token_ms", "time_per_output_token_ms", "end_to_end_ms")
    return {
        "index": index,
        **picked(request, "num_output_tokens", *times, "tokens_cached", "tokens_recomputed", "times_preempted"),
        "forwards": [
            {"tokens": rows, "milliseconds": forward.forward_ms}
            for forward, rows in zip(request.forwards, request.rows, strict=True)
        ],
        "tokens": [
            {"step": token_step.step, "milliseconds": (token_step.ended - token_step.started) * 1e3}
            for token_step in request.token_steps
        ],
        "speculation": [as_object(draft, "acceptance") for draft in _draft_totals(request.cycles)],
        "cycles": plain(request.cycles),
    }
