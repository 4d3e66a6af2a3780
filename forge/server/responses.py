"""How answers are written: as a whole body, or as the events of a stream. OpenAI's two shapes are here, and what the
other APIs make of a chat's."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.task import Logprobs
from forge.errors import ForgeError
from forge.server.engine_client import Delta, Generation, Prompt
from forge.server.errors import ApiError, to_api_error
from forge.server.requests import beside_the_loop
from forge.server.resumption import shown_id
from forge.server.schema import ChatRequest, CompletionRequest, OpenAiRequest
from forge.server.splitting import ReasoningSplitter, ToolCallSplitter
from forge.server.streaming import DONE, event
from forge.server.strict_json import to_json
from forge.server.structured import tool_use
from forge.tokenizer import Tokenizer


def usage_object(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Count the tokens of an answer. Each prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.metrics.tokens_cached for output in outputs)
    return {**_usage(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def size_of(outputs: Sequence[RequestOutput]) -> int:
    """Count the tokens and log probabilities of an answer, which the time of writing it follows."""
    return sum(
        len(sample.token_ids)
        + sum(len(entry) for entry in (*(sample.logprobs or ()), *(output.prompt_logprobs or ())) if entry is not None)
        for output in outputs
        for sample in output.outputs
    )


def timings_object(
    num_prompt_tokens: int, prompt_seconds: float, num_tokens: int, seconds: float, num_cached: int | None = None
) -> dict[str, Any]:
    """Return llama-server's `timings`. num_prompt_tokens: without the cached ones, if their number is given."""
    times: dict[str, Any] = {"cache_n": num_cached} if num_cached is not None else {}
    for name, number, elapsed in (("prompt", num_prompt_tokens, prompt_seconds), ("predicted", num_tokens, seconds)):
        times |= {f"{name}_n": number, f"{name}_ms": elapsed * 1e3}
        times[f"{name}_per_token_ms"] = elapsed * 1e3 / number if number else 0.0
        times[f"{name}_per_second"] = number / elapsed if elapsed else 0.0
    return times


def whole_timings(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the timings of a request that has ended: up to the first token of all of its choices, and from there to
    the last."""
    metrics = [sample.metrics for output in outputs for sample in output.outputs]
    first = min(
        (timing.first_token for timing in metrics if timing.first_token is not None), default=metrics[0].arrived
    )
    last = max((timing.last_token for timing in metrics if timing.last_token is not None), default=first)
    usage = usage_object(outputs)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    waited = first - metrics[0].arrived
    return timings_object(usage["prompt_tokens"] - cached, waited, usage["completion_tokens"], last - first, cached)


@dataclass
class Answer(ABC):
    """The answer to one request in the form of one API."""

    generation: Generation

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the whole answer, once all outputs have ended."""
        return await beside_the_loop(size_of(outputs), lambda: self.written(outputs))

    @abstractmethod
    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Write the whole answer. Runs on a thread beside the loop if that takes long."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events while it is generated."""


@dataclass
class Shape(Answer):
    """The parts that both of OpenAI's answers share."""

    model: str
    tokenizer: Tokenizer
    body: OpenAiRequest
    fingerprint: str
    object_names: ClassVar[tuple[str, str]]
    """What a whole answer and a chunk call themselves."""

    def __post_init__(self) -> None:
        self.request_id, self.prompts = shown_id(self.generation.request_id), self.generation.prompts
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        self._num_tokens = 0
        """Output tokens in the chunks so far."""
        self._head = {"id": self.request_id, "created": int(time.time()), "model": self.model}
        self._head["system_fingerprint"] = self.fingerprint
        self._began, self._first_token = time.perf_counter(), 0.0

    @abstractmethod
    def begin(self, n: int) -> Iterator[dict[str, Any]]:
        """Return the chunks that come before all tokens, of `n` choices per prompt."""

    @abstractmethod
    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a delta, none if a token brings nothing that can be shown yet."""

    @abstractmethod
    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """Return the choices of a whole answer."""

    def facts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return a whole answer without its choices."""
        facts = {**self._head, "object": self.object_names[0], "usage": usage_object(outputs)}
        return facts | ({"timings": whole_timings(outputs)} if self.body.timings_per_token else {})

    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Encode one choice at a time: one with many log probabilities is large."""
        head = to_json(self.facts(outputs))
        return head[:-1] + b',"choices":[' + b",".join(map(to_json, self.choices(outputs))) + b"]}"

    def chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.object_names[1], "choices": choices}
        if self.body.usage_wanted:  # the chunks before the last have what there is so far, or an empty one
            so_far = _usage(self._num_prompt_tokens, self._num_tokens)
            chunk["usage"] = so_far if self.body.continuous_usage else None
        if self.body.timings_per_token:
            chunk["timings"] = self._timings_so_far()
        return chunk

    def _timings_so_far(self) -> dict[str, Any]:
        """Return the timings of a stream. How much of the prompt was cached is not known before the end."""
        now = time.perf_counter()
        if self._num_tokens and not self._first_token:
            self._first_token = now
        first = self._first_token or now
        return timings_object(self._num_prompt_tokens, first - self._began, self._num_tokens, now - first)

    def _end(self, reason: str | None, stop: str | int | None) -> dict[str, Any]:
        """Return why a choice ended. The stop reason is null for EOS."""
        is_told = isinstance(stop, str) or stop in (self.body.stop_token_ids or ())
        return {"finish_reason": reason, "stop_reason": stop if is_told else None}

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None]:
        """Return log probabilities as vLLM does: for each prompt token the most probable ones and itself, by token
        id."""
        most = self.body.prompt_logprobs or 0
        return [
            None
            if entry is None
            else {
                str(token_id): {
                    "logprob": logprob,
                    "rank": place if place <= most else None,
                    "decoded_token": self.tokenizer.token_text(token_id),
                }
                for place, (token_id, logprob) in enumerate(entry, 1)
            }
            for entry in output.prompt_logprobs or ()
        ]

    def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks; those of a generation that is not streamed when all choices have ended, one for each."""
        return self._chunks() if self.generation.stream else self._whole_choices()

    async def _chunks(self) -> AsyncIterator[bytes]:
        generation, position = self.generation, self.generation.position
        begin = b"".join(map(event, self.begin(generation.params.n)))
        if begin and (position is None or position.seen is None):
            yield begin if position is None else position.mark(begin)
        async for deltas in generation.updates():
            if position is None:
                piece = b"".join([event(chunk) for delta in deltas for chunk in self.delta(delta)])
            else:
                chunks = [chunk for delta in deltas for chunk in position.new_chunks(delta, self.delta(delta))]
                piece = position.mark(b"".join(map(event, chunks)))
            if generation.has_nothing_more:
                yield piece + await self._last_events()
                return
            if piece:
                yield piece
        yield await self._last_events()

    async def _whole_choices(self) -> AsyncIterator[bytes]:
        outputs = await self.generation.finished()
        choices = self.choices(outputs)
        for _ in range(len(self.prompts) * self.generation.params.n):
            yield await beside_the_loop(size_of(outputs), lambda: event(self.chunk_of([next(choices)])))
        yield await self._last_events()

    async def _last_events(self) -> bytes:
        """Return what follows the last choice's end: a chunk of usage without choices, if requested, and the mark of
        the end."""
        outputs = await self.generation.finished()
        if not self.body.usage_wanted:
            return DONE
        timings = {"timings": whole_timings(outputs)} if self.body.timings_per_token else {}
        return event({**self.chunk_of([]), "usage": usage_object(outputs), **timings}) + DONE


@dataclass
class CompletionShape(Shape):
    """Writes a request's updates and result as `/v1/completions` does."""

    body: CompletionRequest
    object_names = "text_completion", "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._echo: list[str | None] = [None] * len(self.prompts)
        """For each prompt, the text that its choices begin with, or None."""
        if self.body.echo:
            decode = self.tokenizer.decode
            self._echo = [decode(prompt.token_ids) if prompt.text is None else prompt.text for prompt in self.prompts]
        self._begun: set[int] = set()
        self._lengths: dict[int, int] = {}
        """Characters of each choice's text so far, for the offsets of its tokens."""

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        samples = [(*pair, sample) for pair in zip(outputs, self._echo, strict=True) for sample in pair[0].outputs]
        for index, (output, echo, sample) in enumerate(samples):
            logprobs = None
            if echo is not None and output.prompt_logprobs is not None:  # the first token of the prompt has none
                logprobs = self._logprobs(index, output.prompt_token_ids, output.prompt_logprobs)
            if sample.logprobs is not None:
                logprobs = _joined(logprobs, self._logprobs(index, sample.token_ids, sample.logprobs))
            self._num_tokens += len(sample.token_ids)
            choice = {"index": index, "text": (echo or "") + sample.text, "logprobs": logprobs}
            choice |= self._end(sample.finish_reason, sample.stop_reason)
            if self.body.return_token_ids:
                choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": sample.token_ids}
            if self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(output)
            yield choice

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """Return a delta's chunk, or none: a token may bring nothing that can be shown yet."""
        if not (delta.text or delta.finish_reason or delta.logprobs or self.body.return_token_ids):
            return []
        logprobs = self._logprobs(delta.choice, delta.token_ids, delta.logprobs) if delta.logprobs else None
        self._num_tokens += len(delta.token_ids)
        choice = {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        if delta.finish_reason is not None:
            choice |= self._end(delta.finish_reason, delta.stop_reason)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                choice["prompt_token_ids"] = self.prompts[delta.choice // (self.body.n or 1)].token_ids
        return [self.chunk_of([choice])]

    def begin(self, n: int) -> Iterator[dict[str, Any]]:
        """Return the first chunk of each of a prompt's `n` choices, if the prompt was requested with it."""
        for choice in range(n * len(self.prompts)):
            text = self._echo[choice // n]
            if text is not None:
                self._lengths[choice] = len(text)
                yield self.chunk_of([{"index": choice, "text": text, "logprobs": None, "finish_reason": None}])

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[Logprobs | None]
    ) -> dict[str, list[Any]]:
        """Write the legacy shape: four lists of one entry per token."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self.tokenizer.token_text(token_id)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(None if entry is None else dict(entry)[token_id])
            columns["top_logprobs"].append(
                None if entry is None else {self.tokenizer.token_text(rival): logprob for rival, logprob in entry}
            )
            columns["text_offset"].append(self._lengths.get(index, 0))
            self._lengths[index] = self._lengths.get(index, 0) + len(text)
        return columns


def _joined(first: dict[str, list[Any]] | None, second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return second if first is None else {name: first[name] + second[name] for name in second}


def ends_in_thinking(prompt: Prompt) -> bool:
    """Return whether a prompt ends inside the thinking part."""
    return prompt.text is not None and prompt.text.rstrip().endswith("<think>")


@dataclass
class ChatShape(Shape):
    """Writes a request's updates and result as `/v1/chat/completions` does."""

    body: ChatRequest
    object_names = "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._top = self.body.top_logprobs or 0
        self._in_reasoning = ends_in_thinking(self.prompts[0])
        tools = tool_use(self.body)
        self._callable = tools.names if tools is not None else frozenset()
        self._splitters: dict[int, tuple[ReasoningSplitter, ToolCallSplitter]] = {}

    def facts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        facts = super().facts(outputs)
        if self.body.return_token_ids:
            facts["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self.body.prompt_logprobs is not None:
            facts["prompt_logprobs"] = self._prompt_logprobs(outputs[0])
        return facts

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        return (self._choice(sample) for output in outputs for sample in output.outputs)

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        """Join the chunks of a choice that has ended."""
        parts = [chunk["choices"][0] for chunk in self.delta(Delta.of(sample))]
        fields = {name: value for part in parts for name, value in part["delta"].items()}
        calls = [{name: call[name] for name in call if name != "index"} for call in fields.pop("tool_calls", ())]
        message = {"role": "assistant", "content": None if calls else "", "refusal": None, **fields}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": sample.index, "message": message, "logprobs": parts[0]["logprobs"]}
        choice |= {name: parts[-1][name] for name in ("finish_reason", "stop_reason")}
        if self.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def begin(self, n: int) -> Iterator[dict[str, Any]]:
        """Return the first chunk of each of `n` choices."""
        ids = {"prompt_token_ids": self.prompts[0].token_ids} if self.body.return_token_ids else {}
        for choice in range(n):
            yield self._chunk(choice, {"role": "assistant", "content": ""}) | ids

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a delta: reasoning, answer, tool calls and end, as far as there are any."""
        if delta.choice not in self._splitters:
            self._splitters[delta.choice] = ReasoningSplitter(self._in_reasoning), ToolCallSplitter(self._callable)
        thinking, calling = self._splitters[delta.choice]
        parts = [thinking.push(delta.text)]
        if delta.finish_reason is not None:
            parts.append(thinking.finish())
        reasoning, answer = ("".join(texts) for texts in zip(*parts, strict=True))
        calls: list[dict[str, Any]] = []
        if self._callable:
            answer, calls = calling.push(answer)
            if delta.finish_reason is not None:
                answer += calling.finish(delta.finish_reason != "stop" or isinstance(delta.stop_reason, str))
        named = (("reasoning_content", reasoning), ("content", answer), ("tool_calls", calls))
        fields = {name: value for name, value in named if value}
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        self._num_tokens += len(delta.token_ids)
        chunks = []
        if fields or logprobs or (self.body.return_token_ids and delta.token_ids):
            chunks.append(self._chunk(delta.choice, fields, logprobs))
            if self.body.return_token_ids:
                chunks[-1]["choices"][0]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.choice, {}))
            is_for_calls = calling.num_calls and delta.finish_reason == "stop"  # and not cut
            reason = "tool_calls" if is_for_calls else delta.finish_reason
            chunks[-1]["choices"][0] |= self._end(reason, delta.stop_reason)
        return chunks

    def _chunk(self, choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.chunk_of([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}])

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[Logprobs | None]) -> dict[str, Any]:
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            known = entry or ()
            top = [self._token(rival, logprob) for rival, logprob in known[: self._top]]
            content.append(self._token(token_id, dict(known)[token_id]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self.tokenizer.token_bytes(token_id)
        return {"token": self.tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(token_bytes)}


class EventWriter(Answer):
    """Writes a chat's answer as another API does: its chunks become that API's events, and a whole answer is made of
    the same events."""

    def __init__(self, shape: ChatShape):
        super().__init__(shape.generation)
        self._shape = shape

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events that come before all tokens."""

    @abstractmethod
    def _take(self, choice: Mapping[str, Any]) -> None:
        """Take in what a chunk says beside its delta."""

    @abstractmethod
    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        """Add `reasoning` or `content`."""

    @abstractmethod
    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        """Begin a tool call, or add to the last one's arguments."""

    @abstractmethod
    def finish(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the events that come after all tokens."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Return the last event of an answer that failed."""

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer, after `finish`."""

    def _on_end(self, outputs: Sequence[RequestOutput]) -> None:
        """Do nothing; a subclass acts here, on the loop, before the end of the answer is sent."""

    def push(self, delta: Delta) -> bytes:
        """Return the events of a delta, often none."""
        events: list[bytes] = []
        for chunk in self._shape.delta(delta):
            (choice,) = chunk["choices"]
            self._take(choice)
            for name, value in choice["delta"].items():  # reasoning, content and calls, in this order
                if name == "tool_calls":
                    events += [event for call in value for event in self._call(call)]
                else:
                    events += self._grow(name.removesuffix("_content"), value)
        return b"".join(events)

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        body = await super().whole(outputs)
        self._on_end(outputs)
        return body

    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        self.push(Delta.of(outputs[0].outputs[0]))
        self.finish(outputs)
        return to_json(self.answer(outputs))

    async def events(self) -> AsyncIterator[bytes]:
        yield self.begin()
        try:
            async for deltas in self.generation.updates():
                if piece := b"".join(map(self.push, deltas)):
                    yield piece
            outputs = await self.generation.finished()
            last = self.finish(outputs)
            self._on_end(outputs)
            yield last
        except ForgeError as error:
            yield self.fail(to_api_error(error))
