"""Outputs in the shapes of OpenAI's API: whole bodies and the chunks of a stream."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.task import Logprobs
from forge.server.engine_client import Delta, Prompt
from forge.server.reasoning import ReasoningSplitter, split_reasoning
from forge.server.schema import ChatRequest, CompletionRequest, OpenAiRequest
from forge.server.strict_json import to_json
from forge.server.tools import ToolCallSplitter, split_tool_calls, tool_use
from forge.tokenizer import Tokenizer


def usage_object(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Count the tokens of an answer. Each prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.metrics.tokens_cached for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


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


class Shape:
    """The parts that all answers to one request share."""

    whole: str
    chunk: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        body: OpenAiRequest,
        prompts: Sequence[Prompt],
        fingerprint: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.usage_wanted = body.usage_wanted
        """Whether a stream ends with a chunk of usage; the chunks before it have what there is so far, or an empty
        one."""
        self._body, self._prompts = body, prompts
        self._num_tokens = 0
        """Output tokens in the chunks so far."""
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._began, self._first_token = time.perf_counter(), 0.0
        if fingerprint is not None:
            self._head["system_fingerprint"] = fingerprint

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def facts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return a whole answer without its choices."""
        facts = {**self._head, "object": self.whole, "usage": usage_object(outputs)}
        return facts | ({"timings": whole_timings(outputs)} if self._body.timings_per_token else {})

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Write the whole answer, encoded one choice at a time: one with many log probabilities is large."""
        head = to_json(self.facts(outputs))
        return head[:-1] + b',"choices":[' + b",".join(map(to_json, self.choices(outputs))) + b"]}"

    def chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk, "choices": choices}
        if self.usage_wanted:
            chunk["usage"] = self._usage_so_far() if self._body.continuous_usage else None
        if self._body.timings_per_token:
            chunk["timings"] = self._timings_so_far()
        return chunk

    def _timings_so_far(self) -> dict[str, Any]:
        """Return the timings of a stream. How much of the prompt was cached is not known before the end."""
        now = time.perf_counter()
        if self._num_tokens and not self._first_token:
            self._first_token = now
        first = self._first_token or now
        prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        return timings_object(prompt, first - self._began, self._num_tokens, now - first)

    def _usage_so_far(self) -> dict[str, int]:
        prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        total = prompt + self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self._num_tokens, "total_tokens": total}

    def _end(self, reason: str | None, stop: str | int | None) -> dict[str, Any]:
        """Return why a choice ended. The stop reason is null for EOS."""
        is_told = isinstance(stop, str) or stop in (self._body.stop_token_ids or ())
        return {"finish_reason": reason, "stop_reason": stop if is_told else None}

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None]:
        """Return log probabilities as vLLM does: for each prompt token the most probable ones and itself, by token
        id."""
        most = self._body.prompt_logprobs or 0
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

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the last chunk of a stream with usage: it has no choices."""
        timings = {"timings": whole_timings(outputs)} if self._body.timings_per_token else {}
        return {**self.chunk_of([]), "usage": usage_object(outputs), **timings}


class CompletionShape(Shape):
    """Writes a request's updates and result as `/v1/completions` does."""

    whole = chunk = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        fingerprint: str | None = None,
    ):
        super().__init__(request_id, model, tokenizer, body, prompts, fingerprint)
        self._echo = [self._text_of(prompt) if body.echo else None for prompt in prompts]
        """For each prompt, the text that its choices begin with, or None."""
        self._begun: set[int] = set()
        self._lengths: dict[int, int] = {}
        """Characters of each choice's text so far, for the offsets of its tokens."""

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        samples = [(*pair, sample) for pair in zip(outputs, self._echo, strict=True) for sample in pair[0].outputs]
        for index, (output, echo, sample) in enumerate(samples):
            logprobs = self._echoed_logprobs(index, output) if echo is not None else None
            if sample.logprobs is not None:
                logprobs = _joined(logprobs, self._logprobs(index, sample.token_ids, sample.logprobs))
            self._num_tokens += len(sample.token_ids)
            choice = {"index": index, "text": (echo or "") + sample.text, "logprobs": logprobs}
            choice |= self._end(sample.finish_reason, sample.stop_reason)
            if self._body.return_token_ids:
                choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": sample.token_ids}
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(output)
            yield choice

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """Return a delta's chunk, or none: a token may bring nothing that can be shown yet."""
        if not (delta.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids):
            return []
        logprobs = self._logprobs(delta.choice, delta.token_ids, delta.logprobs) if delta.logprobs else None
        self._num_tokens += len(delta.token_ids)
        choice = {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        if delta.finish_reason is not None:
            choice |= self._end(delta.finish_reason, delta.stop_reason)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                choice["prompt_token_ids"] = self._prompts[delta.choice // (self._body.n or 1)].token_ids
        return [self.chunk_of([choice])]

    def begin(self, n: int) -> Iterator[dict[str, Any]]:
        """Return the first chunk of each of a prompt's `n` choices, if the prompt was requested with it."""
        for choice in range(n * len(self._prompts)):
            text = self._echo[choice // n]
            if text is not None:
                self._lengths[choice] = len(text)
                yield self.chunk_of([{"index": choice, "text": text, "logprobs": None, "finish_reason": None}])

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self.tokenizer.decode(prompt.token_ids)

    def _echoed_logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """Return the log probabilities of the prompt, the first of which has none."""
        if output.prompt_logprobs is None:
            return None
        return self._logprobs(index, output.prompt_token_ids, output.prompt_logprobs)

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


def _reason_of_calls(reason: str | None) -> str | None:
    """Return why an answer with tool calls ended: for them, unless it was cut."""
    return "tool_calls" if reason == "stop" else reason


def _is_cut(end: CompletionOutput | Delta) -> bool:
    """Return whether a choice would have gone on."""
    return end.finish_reason != "stop" or isinstance(end.stop_reason, str)


def ends_in_thinking(prompt: Prompt) -> bool:
    """Return whether a prompt ends inside the thinking part."""
    return prompt.text is not None and prompt.text.rstrip().endswith("<think>")


class ChatShape(Shape):
    """Writes a request's updates and result as `/v1/chat/completions` does."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        body: ChatRequest,
        prompts: Sequence[Prompt],
        fingerprint: str | None = None,
    ):
        super().__init__(request_id, model, tokenizer, body, prompts, fingerprint)
        self._top = body.top_logprobs or 0
        self._in_reasoning = ends_in_thinking(prompts[0])
        tools = tool_use(body)
        self._callable = tools.names if tools is not None else frozenset()
        self._splitters: dict[int, tuple[ReasoningSplitter, ToolCallSplitter]] = {}

    def facts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        facts = super().facts(outputs)
        if self._body.return_token_ids:
            facts["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self._body.prompt_logprobs is not None:
            facts["prompt_logprobs"] = self._prompt_logprobs(outputs[0])
        return facts

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        return (self._choice(sample) for output in outputs for sample in output.outputs)

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        reasoning, answer = split_reasoning(sample.text, self._in_reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": answer, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        reason: str | None = sample.finish_reason
        if self._callable:
            content, calls = split_tool_calls(answer, self._callable, _is_cut(sample))
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
                reason = _reason_of_calls(reason)
        logprobs = None if sample.logprobs is None else self._logprobs(sample.token_ids, sample.logprobs)
        choice = {"index": sample.index, "message": message, "logprobs": logprobs}
        choice |= self._end(reason, sample.stop_reason)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def begin(self, n: int) -> Iterator[dict[str, Any]]:
        """Return the first chunk of each of `n` choices."""
        ids = {"prompt_token_ids": self._prompts[0].token_ids} if self._body.return_token_ids else {}
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
                answer += calling.finish(_is_cut(delta))
        named = (("reasoning_content", reasoning), ("content", answer), ("tool_calls", calls))
        fields = {name: value for name, value in named if value}
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        self._num_tokens += len(delta.token_ids)
        chunks = []
        if fields or logprobs or (self._body.return_token_ids and delta.token_ids):
            chunks.append(self._chunk(delta.choice, fields, logprobs))
            if self._body.return_token_ids:
                chunks[-1]["choices"][0]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.choice, {}))
            reason = _reason_of_calls(delta.finish_reason) if calling.num_calls else delta.finish_reason
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
