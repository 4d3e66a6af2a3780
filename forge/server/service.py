"""What the endpoints share: the engine's client, the limits, and the ways to submit a request and to answer it."""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import Request
from fastapi.responses import Response

from forge import __version__
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.engine_client import EngineClient, Generation, Prompt, ResumableClient
from forge.server.errors import ApiError, EngineDead, ShuttingDown
from forge.server.exchange import current_exchange
from forge.server.messages import Ready
from forge.server.metrics import HttpMetrics
from forge.server.middleware import Keys
from forge.server.requests import RequestReader
from forge.server.responses import Answer, ChatShape, ends_in_thinking
from forge.server.resumption import parse_event_id
from forge.server.schema import ChatRequest, OpenAiRequest, Sampling
from forge.server.settings import Settings
from forge.server.step_feed import StepFeed
from forge.server.streaming import EventStream, leaving_client
from forge.server.strict_json import JsonAnswer


class Service:
    """The state that the endpoints share."""

    def __init__(self, client: EngineClient, ready: Ready, settings: Settings):
        self.client, self.ready = client, ready
        self.limits = settings.limits
        self.started = int(time.time())
        self.draining = asyncio.Event()
        """Set when the server is closing."""
        self.keys = Keys(settings.api_key, settings.api_key_file)
        self.http = HttpMetrics()
        self.has_room_for_connections: Callable[[], bool] = lambda: True
        self.fingerprint = _fingerprint(ready)
        self.steps = StepFeed(client, settings.debug_texts)
        self.reader = RequestReader(ready, settings)
        self.reader.grammars.start()
        self.tokenizer = self.reader.tokenizer
        self.metrics = client.metrics

    async def begin(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: Sampling,
        request: Request,
        stream: bool | None = None,
    ) -> Generation:
        """Submit prompts once their grammar is known to compile, or resume their stream where the client asks for that;
        return what follows the prompts. stream: whether their tokens are wanted one by one; None means as the body
        says. The client's leaving ends the wait. Raises `ApiError`, and `UsageError` for a `Last-Event-ID` that is
        none."""
        if params.structured is not None:
            async with leaving_client(request):
                params = replace(params, structured=await self.reader.compiled(params.structured, body))
        self.check_queue(len(prompts))
        client, event_id = self.client, request.headers.get("last-event-id")
        stream = bool(body.stream if stream is None else stream)
        generation = Generation(request_id, prompts, params, stream, body.priority or 0, body.cache_salt or "")
        if event_id and stream and isinstance(body, OpenAiRequest) and isinstance(client, ResumableClient):
            await client.resume(parse_event_id(event_id), generation)
        else:
            client.submit(generation)
        if (exchange := current_exchange()) is not None:
            exchange.generations.append(generation)
        return generation

    async def begin_chat(
        self, request_id: str, body: ChatRequest, request: Request, prompt: Prompt | None = None
    ) -> ChatShape:
        """Submit a chat. prompt: used instead of the messages', if given. Raises `ApiError` for one that is wrong."""
        prompt = prompt or await self.reader.chat_prompt(body)
        params = self.reader.chat_params(body, len(prompt.token_ids), ends_in_thinking(prompt))
        generation = await self.begin(request_id, [prompt], params, body, request)
        return ChatShape(generation, self.reader.model(body.model), self.tokenizer, body, self.fingerprint)

    def id_of(self, body: Sampling, prefix: str) -> str:
        """Return the request's id, with the end that the body gives. Raises `ApiError` if a request of that id runs."""
        request_id = f"{prefix}-{body.request_id or secrets.token_hex(12)}"
        if body.request_id is not None and self.client.is_running(request_id):
            raise ApiError(f"a request with the request_id {body.request_id} runs already", param="request_id")
        return request_id

    def check_queue(self, num_prompts: int) -> None:
        """Raise `ApiError` if so many more requests would be too many."""
        if num_prompts > self.limits.max_queue:
            raise ApiError(f"that asks for {num_prompts} answers at once, and {self.limits.max_queue} go: ask for less")
        if self.client.num_unfinished + num_prompts > self.limits.max_queue:
            message = f"{self.client.num_unfinished} prompts are waiting already: come back later"
            raise ApiError(message, 429, code="queue_full", retry_after=1)

    def check_alive(self) -> None:
        """Raise an error if no request will be answered any more."""
        if self.client.dead:
            raise EngineDead
        if not self.client.probe(self.limits.step_timeout):
            message = f"the engine has not ended a step for {self.limits.step_timeout:g} s"
            raise ApiError(message, 503, code="engine_hung", retry_after=5)

    def check_ready(self) -> None:
        """Raise an error if a new request would be refused."""
        self.client.check_ready()
        if self.draining.is_set():
            raise ShuttingDown
        if self.client.num_unfinished >= self.limits.max_queue:
            raise ApiError(f"{self.client.num_unfinished} prompts are waiting", 503, code="queue_full", retry_after=1)
        if not self.has_room_for_connections():
            raise ApiError("all connections are in use", 503, code="connections_full", retry_after=1)

    def processes(self) -> dict[str, int]:
        """Return the server's processes on this machine, by name."""
        engine = self.client.pid
        return {"server": os.getpid()} | ({} if engine is None else {"engine": engine})

    def give_up(self, generation: Generation) -> None:
        """Abort a generation whose client has left."""
        if not generation.ended:
            self.metrics.take_abort()
            self.client.abort(generation)

    async def whole(self, generation: Generation, request: Request) -> list[RequestOutput]:
        """Wait until all outputs have ended and return them. The client's leaving ends the generation."""
        try:
            async with leaving_client(request):
                return await generation.finished()
        finally:
            self.give_up(generation)

    async def respond(self, answer: Answer, request: Request, stream: bool | None = None) -> Response:
        """Answer with events, or with one body. stream: None means as the generation is. Raises, before anything is
        sent, what the engine has against a prompt."""
        generation = answer.generation
        if not (generation.stream if stream is None else stream):
            return JsonAnswer(await answer.whole(await self.whole(generation, request)))
        try:
            await generation.accepted()
        except BaseException:
            self.give_up(generation)
            raise
        return EventStream(answer.events(), self.limits.stall_timeout, lambda: self.give_up(generation))


def _fingerprint(ready: Ready) -> str:
    """Return OpenAI's `system_fingerprint`: the same as long as one seed gives the same answer."""
    model = (ready.model_name, ready.device, ready.device_description, ready.vocab_size, ready.max_model_len)
    return f"fp_{hashlib.sha256(repr((__version__, *model)).encode()).hexdigest()[:10]}"
