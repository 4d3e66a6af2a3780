"""The endpoints: each reads a body, submits it, and gives the engine's output OpenAI's shape."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute

from forge import __version__
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.server.engine_client import EngineClient, EngineDead, Generation, Prompt, ShuttingDown
from forge.server.errors import ApiError, install_handlers
from forge.server.messages import Ready
from forge.server.metrics import CONTENT_TYPE
from forge.server.middleware import Draining, Gate
from forge.server.redaction import without_texts
from forge.server.requests import DEFAULT_TOKENS, RequestReader, beside_the_loop, special_of
from forge.server.responses import ChatShape, CompletionShape, Shape, ends_in_thinking, size_of, usage_object
from forge.server.responses_api import ResponsesRequest, ResponseWriter, chat_request, own_names
from forge.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Sampling,
    TokenizeRequest,
)
from forge.server.scores import add_scores
from forge.server.settings import Settings
from forge.server.streaming import DONE, EventStream, event, leaving_client
from forge.server.strict_json import JsonAnswer, StrictRoute, to_json
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "The request is wrong; the error says where"),
        (401, "The key is missing or wrong"),
        (403, "The server is not known by the name in Host"),
        (404, "There is no such thing"),
        (413, "The body is too large"),
        (415, "The body is of another kind than JSON"),
        (429, "The queue is full; come back later"),
        (500, "The engine could not finish the request"),
        (503, "The server is closing, or its engine has stopped"),
    )
}


_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "One body, or events where stream is true"}
}


class Service:
    """What the endpoints share."""

    def __init__(self, client: EngineClient, ready: Ready, settings: Settings):
        self.client, self.ready, self.settings = client, ready, settings
        self.limits = settings.limits
        self.started = int(time.time())
        self.draining = Draining()
        names = tuple(dict.fromkeys((*settings.model_names, ready.model_name)))
        self.tokenizer = ready.tokenizer()
        self.reader = RequestReader(
            self.tokenizer, names, ready.vocab_size, ready.max_model_len, settings.limits, ready.default_sampling
        )
        self.metrics = client.new_metrics(names[0], ready)
        client.on_step = self.metrics.take_step
        client.on_death = self.metrics.take_failures
        client.on_end = lambda generation, output: self.metrics.take_output(
            output, generation.params, generation.arrived
        )

    def submit(
        self, request_id: str, prompts: Sequence[Prompt], params: SamplingParams, body: Sampling, stream: bool
    ) -> Generation:
        self.check_queue(len(prompts))
        return self.client.submit(
            request_id, prompts, params, stream=stream, priority=body.priority or 0, salt=body.cache_salt or ""
        )

    def check_queue(self, num_prompts: int) -> None:
        """Raises where so many more would be too many."""
        if num_prompts > self.limits.max_queue:
            raise ApiError(f"that asks for {num_prompts} answers at once, and {self.limits.max_queue} go: ask for less")
        if self.client.num_unfinished + num_prompts > self.limits.max_queue:
            message = f"{self.client.num_unfinished} prompts are waiting already: come back later"
            raise ApiError(message, 429, code="queue_full", retry_after=1)

    def give_up(self, generation: Generation) -> None:
        """Abort a generation whose client has left."""
        if not generation.ended:
            self.metrics.take_abort()
            self.client.abort(generation)

    @asynccontextmanager
    async def followed(self, generation: Generation, request: Request) -> AsyncIterator[None]:
        """Within it, the client's leaving ends the generation."""
        try:
            async with leaving_client(request):
                yield
        finally:
            self.give_up(generation)

    async def whole(self, generation: Generation, request: Request) -> list[RequestOutput]:
        """The outputs, when all have ended."""
        async with self.followed(generation, request):
            return await generation.finished()

    async def answer(self, generation: Generation, request: Request, shape: Shape) -> JsonAnswer:
        outputs = await self.whole(generation, request)
        return JsonAnswer(await beside_the_loop(size_of(outputs), lambda: shape.body(outputs)))

    async def stream(self, generation: Generation, events: AsyncIterator[bytes]) -> EventStream:
        """The answer that sends `events`. Raises, before anything is sent, what the engine has against a prompt."""
        try:
            await generation.accepted()
        except BaseException:
            self.give_up(generation)
            raise
        return EventStream(events, self.limits.stall_timeout, lambda: self.give_up(generation))


def create_app(client: EngineClient, ready: Ready, settings: Settings) -> FastAPI:
    """The application around a connected engine."""
    service = Service(client, ready, settings)
    app = FastAPI(
        title="forge", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS, redirect_slashes=False
    )
    app.state.service = service
    app.router.route_class = StrictRoute
    install_handlers(app)
    _add_generation(app, service)
    _add_text(app, service)
    add_scores(app, service)
    _add_watching(app, service)
    _add_aliases(app)
    _describe(app)
    app.add_middleware(Gate, settings=settings, draining=service.draining)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        reader, request_id = service.reader, f"cmpl-{secrets.token_hex(12)}"
        model = reader.model(body.model)
        prompts = await reader.prompts(body.prompt, **special_of(body))
        params = await reader.compiled(reader.completion_params(body, prompts), body)
        shape = CompletionShape(request_id, model, service.tokenizer, body, prompts)
        # The prompt's log probabilities are there when it has ended: such a stream has one chunk per choice.
        piecemeal = bool(body.stream) and not (body.echo and params.prompt_logprobs is not None)
        generation = service.submit(request_id, prompts, params, body, piecemeal)
        if not body.stream:
            return await service.answer(generation, request, shape)
        return await service.stream(generation, (_events if piecemeal else _whole_events)(shape, generation))

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        shape, generation = await _begin_chat(service, request_id, body)
        if not body.stream:
            return await service.answer(generation, request, shape)
        return await service.stream(generation, _events(shape, generation))

    @app.post("/v1/responses", responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation with a list of items. Nothing is stored."""
        request_id = f"resp_{secrets.token_hex(12)}"
        with own_names():
            shape, generation = await _begin_chat(service, request_id, chat_request(body))
        writer = ResponseWriter(request_id, service.reader.model(body.model), body, generation.params, shape)
        if not body.stream:
            outputs = await service.whole(generation, request)
            return JsonAnswer(await beside_the_loop(size_of(outputs), lambda: writer.body(outputs)))
        return await service.stream(generation, _response_events(writer, generation))

    @app.post("/generate", responses=_STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text, and say what it cost and why it waited."""
        reader, request_id = service.reader, f"gen-{secrets.token_hex(12)}"
        reader.model(body.model)
        reader.check_supported(body)
        prompt = await reader.one_prompt(body.prompt, **special_of(body))
        max_tokens = reader.max_tokens(body.max_tokens, DEFAULT_TOKENS, len(prompt.token_ids), "max_tokens")
        params = await reader.compiled(reader.params(body, 1, max_tokens), body)
        generation = service.submit(request_id, [prompt], params, body, bool(body.stream))
        if not body.stream:
            await service.whole(generation, request)
            return JSONResponse(await _native_body(service, generation))
        return await service.stream(generation, _native_events(service, generation))


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        reader = service.reader
        reader.model(body.model)
        given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise ApiError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            token_ids = (await reader.chat_prompt(body)).token_ids
        else:
            token_ids = await reader.encode(getattr(body, given[0]), given[0], **special_of(body))
        found = {"count": len(token_ids), "max_model_len": service.ready.max_model_len, "tokens": token_ids}
        return JsonAnswer(to_json(found))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.reader.model(body.model)
        text = await beside_the_loop(len(body.tokens), lambda: service.tokenizer.decode(body.tokens))
        return JsonAnswer(to_json({"prompt": text, "content": text}))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(service, name) for name in service.reader.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model_object(service, service.reader.model(name))


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Whether requests are answered."""
        if service.client.dead:
            raise EngineDead
        if service.draining.begun:
            raise ShuttingDown
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(service.metrics.text(service.client.gauges), media_type=CONTENT_TYPE)

    @app.get("/debug/requests/{request_id}")
    async def debug_request(request_id: str) -> dict[str, Any]:
        """What happened to a request, step by step. The last few hundred are remembered."""
        timeline = await service.client.ask("timeline", request_id)
        if timeline is None:
            raise ApiError("no such request is remembered", 404)
        return timeline

    @app.get("/debug/steps", responses=_STREAMED)
    async def debug_steps() -> Response:
        """The engine's steps from now on, as server-sent events; without texts unless the server shows them."""
        if service.client.dead:
            raise EngineDead
        events = _step_events(service.client, service.settings.debug_texts)
        return EventStream(events, service.limits.stall_timeout, lambda: None)


def _add_aliases(app: FastAPI) -> None:
    """`/v1/completions` is `/completions` too, and so on: some clients are configured without the `/v1`."""
    for route in [one for one in app.routes if isinstance(one, APIRoute) and one.path.startswith("/v1/")]:
        alias = route.path.removeprefix("/v1")
        app.add_api_route(alias, route.endpoint, methods=list(route.methods or ()), include_in_schema=False)


def _describe(app: FastAPI) -> None:
    """The description of the endpoints, without the framework's own status for a wrong body, which here is 400."""
    document = app.openapi()
    for operation in (one for methods in document["paths"].values() for one in methods.values()):
        operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


async def _begin_chat(service: Service, request_id: str, body: ChatRequest) -> tuple[ChatShape, Generation]:
    """Submit a chat. Raises `ApiError` for one that is wrong."""
    reader = service.reader
    model = reader.model(body.model)
    reader.check_supported(body)
    prompt = await reader.chat_prompt(body)
    params = await reader.compiled(reader.chat_params(body, len(prompt.token_ids), ends_in_thinking(prompt)), body)
    shape = ChatShape(request_id, model, service.tokenizer, body, [prompt])
    return shape, service.submit(request_id, [prompt], params, body, bool(body.stream))


async def _events(shape: CompletionShape | ChatShape, generation: Generation) -> AsyncIterator[bytes]:
    if begin := b"".join(map(event, shape.begin(generation.params.n))):
        yield begin
    async for deltas in generation.updates():
        piece = b"".join([event(chunk) for delta in deltas for chunk in shape.delta(delta)])
        if generation.has_nothing_more:
            yield piece + await _last_events(shape, generation)
            return
        if piece:
            yield piece
    yield await _last_events(shape, generation)


async def _whole_events(shape: CompletionShape, generation: Generation) -> AsyncIterator[bytes]:
    """A chunk for each choice, when all have ended."""
    outputs = await generation.finished()
    choices = shape.choices(outputs)
    for _ in range(len(generation.prompts) * generation.params.n):
        yield await beside_the_loop(size_of(outputs), lambda: event(shape.chunk_of([next(choices)])))
    yield await _last_events(shape, generation)


async def _response_events(writer: ResponseWriter, generation: Generation) -> AsyncIterator[bytes]:
    yield b"".join(writer.begin())
    try:
        async for deltas in generation.updates():
            piece = b"".join([event for delta in deltas for event in writer.push(delta)])
            if piece:
                yield piece
        yield b"".join(writer.finish(await generation.finished()))
    except ForgeError as error:
        yield writer.fail(error)


async def _last_events(shape: CompletionShape | ChatShape, generation: Generation) -> bytes:
    """What follows the last choice's end: usage, where it is wanted, and the mark of the end."""
    outputs = await generation.finished()
    return event(shape.usage_chunk(outputs)) + DONE if shape.usage_wanted else DONE


async def _native_events(service: Service, generation: Generation) -> AsyncIterator[bytes]:
    async for deltas in generation.updates():
        for delta in deltas:
            yield event({"index": delta.choice, "text": delta.text, "token_ids": delta.token_ids})
    yield event(await _native_body(service, generation))
    yield DONE


async def _native_body(service: Service, generation: Generation) -> dict[str, Any]:
    """All of a request's choices with the milliseconds of each token, and what happened to it."""
    outputs = await generation.finished()
    timeline = await service.client.ask("timeline", generation.request_id)
    samples = outputs[0].outputs
    steps = [sample["tokens"] for sample in timeline["samples"]]
    return {
        "id": generation.request_id,
        "model": service.reader.model_names[0],
        "seed": outputs[0].seed,
        "choices": [
            {
                "index": sample.index,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "tokens": [
                    {"token_id": token_id, "text": service.tokenizer.token_text(token_id)} | made
                    for token_id, made in zip(sample.token_ids, steps[sample.index], strict=False)
                ],
                "time_to_first_token_ms": sample.metrics.time_to_first_token_ms,
                "end_to_end_ms": sample.metrics.end_to_end_ms,
            }
            for sample in samples
        ],
        "why": [f"step {happened['step']}: {happened['why']}" for happened in timeline["events"]],
        "usage": usage_object(outputs),
    }


async def _step_events(client: EngineClient, texts: bool) -> AsyncIterator[bytes]:
    encode = codec_of(StepRecord).encode
    async for record in client.records():
        yield event(encode(record if texts else without_texts(record)))
    yield DONE


def _model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "forge",
        "root": service.ready.model_name,
        "max_model_len": service.ready.max_model_len,
    }
