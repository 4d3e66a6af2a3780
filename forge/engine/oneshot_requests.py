"""The requests that keep nothing, from arrival until somebody has taken their answers.

The scheduler's `OneShotQueue` decides when each runs; here is what comes of it. An answer is entered in one assignment
when the step that computed it has happened, so a step that is undone leaves nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from forge.backends.logits import Logits
from forge.cache.kv_storage import KvStorage
from forge.engine.answers import (
    OneShotResult,
    answer,
    answer_in_slices,
    embed,
    joins_batch,
    max_slice_rows,
    wants_likeliest,
)
from forge.engine.choosing import OnLogits
from forge.engine.oneshot import OneShotItem, OneShotRequest
from forge.engine.output_text import OutputText
from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.sampling import BrokenLogits, SampledToken, check_max_logit
from forge.engine.scheduler import Scheduler
from forge.model.model import Model
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import FinishReason, FinishRecord, RequestMetrics, TokenRecord


class Answered(NamedTuple):
    """What a step's answers put into its record."""

    tokens: tuple[TokenRecord, ...]
    finished: tuple[FinishRecord, ...]
    broken: frozenset[int]
    """Those whose logits were no numbers, by sequence id."""


class _End(NamedTuple):
    """How a request ended."""

    finish: FinishRecord
    metrics: RequestMetrics
    result: OneShotResult | None = None
    text: str = ""


@dataclass
class _Known:
    request: OneShotRequest
    end: _End | None = None


class OneShotRequests:
    def __init__(self, vocab_size: int, storage: KvStorage, tokenizer: Tokenizer):
        self._vocab_size = vocab_size
        self._storage = storage
        self._tokenizer = tokenizer
        self._known: dict[str, _Known] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def add(self, request: OneShotRequest) -> None:
        self._known[request.request_id] = _Known(request)

    def is_unfinished(self, request_id: str) -> bool:
        return self._known[request_id].end is None

    def among(self, seq_ids: set[int]) -> list[str]:
        """Those that are known by one of these ids."""
        return [request_id for request_id, known in self._known.items() if known.request.seq_id in seq_ids]

    def result(self, request_id: str) -> OneShotResult | None:
        end = self._known[request_id].end
        return end.result if end is not None else None

    def forget(self, request_id: str) -> None:
        assert self._known[request_id].end is not None, "it is still running"
        del self._known[request_id]

    def abort(
        self, request_id: str, reason: FinishReason, scheduler: Scheduler, error: str | None = None
    ) -> FinishRecord:
        """End a request, if it has not ended; how it did."""
        known = self._known[request_id]
        if known.end is None:
            request = known.request
            metrics = RequestMetrics(len(request.token_ids), 0, request.arrived, None, None)
            known.end = _End(FinishRecord(request.seq_id, reason, error=error), metrics)
            scheduler.num_finished += 1
        scheduler.oneshots.remove(known.request.seq_id)
        return known.end.finish

    def drop_ended(self, scheduler: Scheduler) -> None:
        """Make the queue forget what has ended: an exception may have come between the two."""
        for known in self._known.values():
            if known.end is not None:
                scheduler.oneshots.remove(known.request.seq_id)

    # In a step

    def joining(self, items: Sequence[OneShotItem]) -> list[OneShotItem]:
        """Those whose rows go into the step's own forward."""
        most = max_slice_rows(self._vocab_size)
        return [one for one in items if joins_batch(one, most)]

    def run_apart(
        self, items: Sequence[OneShotItem], model: Model, on_logits: OnLogits | None, probabilities: bool = True
    ) -> dict[int, OneShotResult]:
        """The answers of the others, by passes of their own."""
        answers: dict[int, OneShotResult] = {}
        most = max_slice_rows(self._vocab_size)
        embeddings = [one for one in items if one.request.task.head == "hidden"]
        if embeddings:
            results = embed(embeddings, model, self._storage)
            answers |= {one.request.seq_id: result for one, result in zip(embeddings, results, strict=True)}
        for one in items:
            if one.request.task.head == "logits" and not joins_batch(one, most):
                with _unless_broken(one, answers):
                    found = answer_in_slices(one, model, self._storage, on_logits, probabilities)
                    answers[one.request.seq_id] = found
        return answers

    def answer(
        self,
        joining: Sequence[OneShotItem],
        logits: Logits | None,
        likeliest: Sequence[int],
        tops: Sequence[float],
        on_logits: OnLogits | None,
        probabilities: bool = True,
    ) -> dict[int, OneShotResult]:
        """The answers of those that joined, whose rows are the last of `logits`. Of each row `likeliest` is the token
        with the greatest logit, and `tops` that logit, where any of them `wants_likeliest`."""
        answers: dict[int, OneShotResult] = {}
        first = len(logits) - sum(len(one.item.logit_rows) for one in joining) if joining else 0
        for one in joining:
            rows = range(first, first + len(one.item.logit_rows))
            first = rows.stop
            with _unless_broken(one, answers):
                if wants_likeliest(one.request, on_logits, probabilities):
                    check_max_logit(tops[rows[-1]])
                    found = OneShotResult(SampledToken(likeliest[rows[-1]], None, None))
                else:
                    found = answer(one.request, logits[rows.start : rows.stop], on_logits, probabilities)
                answers[one.request.seq_id] = found
        return answers

    def end(
        self,
        items: Sequence[OneShotItem],
        answers: dict[int, OneShotResult],
        forward_ms: float,
        started: float,
        now: float,
    ) -> Answered:
        """The step has happened: enter the answers, and say what it brought."""
        tokens, finished = [], []
        for one in items:
            request, result = one.request, answers[one.request.seq_id]
            end, token = self._ended(request, result)
            first = now if token is not None else None
            metrics = RequestMetrics(
                len(request.token_ids),
                int(token is not None),
                request.arrived,
                first,
                first,
                (forward_ms,),
                (one.item.num_tokens,),
                started,
                tokens_cached=one.item.start,
            )
            self._known[request.request_id].end = end._replace(metrics=metrics)
            finished.append(end.finish)
            if token is not None:
                tokens.append(token)
        broken = frozenset([finish.seq_id for finish in finished if finish.error is not None])
        return Answered(tuple(tokens), tuple(finished), broken)

    def _ended(self, request: OneShotRequest, result: OneShotResult) -> tuple[_End, TokenRecord | None]:
        """How a request ends with its answer: as a generation of one token does, or simply answered."""
        choice = result.choice
        if result.error is not None:
            return _End(FinishRecord(request.seq_id, "error", error=result.error), None), None
        if choice is None:  # a generation of no tokens has come to its length; anything else is simply answered
            reason = "length" if request.params.max_tokens == 0 else "stop"
            return _End(FinishRecord(request.seq_id, reason), None, result), None
        if choice.token_id in self._tokenizer.eos_token_ids and not request.params.ignore_eos:
            released = held = ""
            reason, stop = "stop", choice.token_id
        else:
            released, held, stop = self._text_of(choice.token_id, request.params.stop)
            reason = "length" if stop is None else "stop"
        position = len(request.token_ids)
        token = TokenRecord(request.seq_id, position, choice.token_id, released, choice.probability, choice.logprobs)
        finish = FinishRecord(request.seq_id, reason, held, stop)
        return _End(finish, None, result, released + held), token

    def _text_of(self, token_id: int, stop: Sequence[str]) -> tuple[str, str, str | None]:
        """What the token makes certain, what only the end does, and the stop string that it completes."""
        if not stop:
            if self._tokenizer.is_hidden(token_id):
                return "", "", None
            try:
                return self._tokenizer.token_bytes(token_id).decode(), "", None
            except UnicodeDecodeError:
                pass  # a part of a character: as a stream would have it
        output = OutputText(StreamingDetokenizer(self._tokenizer), stop)
        return output.push(token_id), output.finish(), output.stopped_by

    # Afterwards

    def output(self, request_id: str) -> RequestOutput:
        """A request as it stands, in the shape of a generation's output."""
        known = self._known[request_id]
        request, end = known.request, known.end
        result = end.result if end is not None else None
        choice = result.choice if result is not None else None
        logprobs = scores = None
        if request.params.logprobs is not None:
            logprobs = (choice.logprobs,) if choice is not None else ()
        if request.task.score_from is not None:
            scores = (*[None] * request.task.score_from, *result.scores) if result is not None else ()
        completion = CompletionOutput(
            index=0,
            text=end.text if end is not None else "",
            token_ids=(choice.token_id,) if choice is not None else (),
            finish_reason=end.finish.reason if end is not None else None,
            stop_reason=end.finish.stop if end is not None else None,
            logprobs=logprobs,
            metrics=end.metrics
            if end is not None
            else RequestMetrics(len(request.token_ids), 0, request.arrived, None, None),
            errors=(end.finish.error,) if end is not None and end.finish.error is not None else (),
        )
        return RequestOutput(request_id, request.prompt, request.token_ids, (completion,), scores, request.seed)


@contextmanager
def _unless_broken(one: OneShotItem, answers: dict[int, OneShotResult]) -> Iterator[None]:
    """Logits that are no numbers are the error of the one request that they are of."""
    try:
        yield
    except BrokenLogits as error:
        answers[one.request.seq_id] = OneShotResult(error=str(error))
