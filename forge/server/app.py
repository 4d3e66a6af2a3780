"""The endpoints: each reads a body, submits it, and gives the engine's output OpenAI's shape."""

from collections.abc import AsyncIterator, Sequence
from itertools import chain, repeat
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute

from forge import __version__
from forge.engine.outputs import RequestOutput
from forge.server.engine_client import EngineClient, Generation
from forge.server.errors import ERRORS, ApiError, EngineDead, answer_error
from forge.server.exchange import Exchange, Exchanges
from forge.server.messages import Ready
from forge.server.messages_api import add_messages
from forge.server.metrics import CONTENT_TYPE, family, process_families, text_of
from forge.server.middleware import Gate
from forge.server.requests import LONG_WORK, beside_the_loop, special_of
from forge.server.responses import Answer, CompletionShape, usage_object
from forge.server.responses_api import add_responses
from forge.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from forge.server.scores import add_scores
from forge.server.service import Service
from forge.server.settings import Settings
from forge.server.streaming import DONE, EventStream, event
from forge.server.strict_json import BodyParser, JsonAnswer, StrictRoute, to_json
from forge.tokenizer import Tokenizer
from forge.views.json_output import picked

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; the error says where"},
    401: {"description": "The key is missing or wrong"},
    403: {"description": "The server is not known by the name in Host"},
    404: {"description": "There is no such thing"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is of another kind than JSON"},
    429: {"description": "The queue is full; come back later"},
    500: {"description": "The engine could not finish the request"},
    503: {"description": "The server is closing, or its engine has stopped"},
}


_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "One body, or events where stream is true"}
}


def create_app(client: EngineClient, ready: Ready, settings: Settings) -> FastAPI:
    """Build the application around a connected engine."""
    service = Service(client, ready, settings)
    app = FastAPI(
        title="forge",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(ERRORS, answer_error),
    )
    app.state.service = service
    app.state.body_parser = BodyParser(ready.max_model_len)
    app.router.route_class = StrictRoute
    _add_generation(app, service)
    _add_text(app, service)
    add_responses(app, service, _STREAMED)
    add_messages(app, service, _STREAMED)
    add_scores(app, service)
    _add_watching(app, service)
    _add_aliases(app)
    _describe(app)
    app.add_middleware(Gate, settings=settings, keys=service.keys, draining=service.draining)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    routes = [route.path for route in app.routes if isinstance(route, APIRoute)]

    def count(exchange: Exchange) -> None:
        service.http.take(exchange.route, exchange.method, exchange.status, exchange.seconds)

    app.state.exchanges = Exchanges(app, settings.access_log, routes, count)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        reader, request_id = service.reader, service.id_of(body, "cmpl")
        model = reader.accept(body)
        prompts = await reader.prompts(body.prompt, **special_of(body), cut=reader.cut_of(body))
        params = reader.completion_params(body, prompts)
        # The prompt's log probabilities are there when it has ended: such a stream has one chunk per choice.
        piecemeal = bool(body.stream) and not (body.echo and params.prompt_logprobs is not None)
        generation = await service.begin(request_id, prompts, params, body, request, piecemeal)
        shape = CompletionShape(generation, model, service.tokenizer, body, service.fingerprint)
        return await service.respond(shape, request, bool(body.stream))

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await service.respond(await service.begin_chat(service.id_of(body, "chatcmpl"), body, request), request)

    @app.post("/generate", responses=_STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text, and say what it cost and why it waited."""
        reader, request_id = service.reader, service.id_of(body, "gen")
        reader.accept(body)
        prompt = await reader.one_prompt(body.prompt, **special_of(body), cut=reader.cut_of(body))
        max_tokens = reader.max_tokens(body.max_tokens, body.room_for_answer, len(prompt.token_ids), "max_tokens")
        params = reader.params(body, 1, max_tokens)
        generation = await service.begin(request_id, [prompt], params, body, request)
        return await service.respond(_NativeAnswer(generation, service), request)


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        reader, tokenizer = service.reader, service.tokenizer
        reader.accept(body)
        if body.add_special is not None:
            body.add_special_tokens = body.add_special
        stated = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
        if len(stated) != 1:
            raise ApiError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            token_ids = (await reader.chat_prompt(body)).token_ids
        else:
            token_ids = await reader.encode(getattr(body, stated[0]), stated[0], **special_of(body))
        answer = {"count": len(token_ids), "max_model_len": service.ready.max_model_len, "tokens": token_ids}

        def encoded() -> bytes:
            if body.with_pieces:
                answer["tokens"] = [{"id": token_id, "piece": _piece(tokenizer, token_id)} for token_id in token_ids]
            if body.return_token_strs:
                answer["token_strs"] = list(map(tokenizer.token_text, token_ids))
            return to_json(answer)

        return JsonAnswer(await beside_the_loop(len(token_ids), encoded))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        service.reader.accept(body)
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
        """Report liveness: whether the server should go on, however busy it is. 503 if its engine is gone, or if a step
        takes longer than `--step-timeout`."""
        service.check_alive()
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Report readiness: whether a new request would be taken now. 503 also while the server closes, and while its
        queue or its connections are full."""
        service.check_alive()
        service.check_ready()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Report everything that is counted, for Prometheus."""
        families = [*service.http.families(app.state.exchanges.num_open), *process_families(service.processes())]
        help_text = "Grammars that wait to be compiled, or are being compiled."
        compiling = {"": service.reader.grammars.num_waiting}
        families.append(family("forge:num_grammars_compiling", "gauge", help_text, compiling))
        text = service.metrics.text(service.reader.model_names[0]) + text_of(families)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/debug/requests/{request_id}")
    async def debug_request(request_id: str) -> Response:
        """Return what happened to a request, step by step. The last few hundred requests are remembered."""
        timeline = await service.client.ask("timeline", request_id)
        if timeline is None:
            raise ApiError("no such request is remembered", 404)
        return JsonAnswer(await beside_the_loop(LONG_WORK, lambda: to_json(timeline)))

    @app.get("/debug/steps", responses=_STREAMED)
    async def debug_steps() -> Response:
        """Stream the engine's steps from now on, as server-sent events; without texts unless the server shows them."""
        if service.client.dead:
            raise EngineDead
        subscriber = service.steps.join()
        return EventStream(
            service.steps.pieces(subscriber), service.limits.stall_timeout, lambda: service.steps.leave(subscriber)
        )


def _add_aliases(app: FastAPI) -> None:
    """Add `/completions` for `/v1/completions`, and so on: some clients are configured without the `/v1`."""
    for route in [route for route in app.routes if isinstance(route, APIRoute) and route.path.startswith("/v1/")]:
        alias = route.path.removeprefix("/v1")
        app.add_api_route(alias, route.endpoint, methods=list(route.methods or ()), include_in_schema=False)


def _describe(app: FastAPI) -> None:
    """Describe the endpoints, without the framework's own status for a wrong body, which here is 400."""
    document = app.openapi()
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


class _NativeAnswer(Answer):
    """All of a request's choices with the milliseconds of each token, and what happened to it."""

    def __init__(self, generation: Generation, service: Service):
        super().__init__(generation)
        self._service = service
        self._timeline: dict[str, Any] = {}

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        timeline = await self._service.client.ask("timeline", outputs[0].request_id)
        self._timeline = timeline or {"samples": [], "events": []}  # without one its engine has died since
        return await super().whole(outputs)

    async def events(self) -> AsyncIterator[bytes]:
        async for deltas in self.generation.updates():
            for delta in deltas:
                yield event({"index": delta.choice, "text": delta.text, "token_ids": delta.token_ids})
        yield b"data: " + await self.whole(await self.generation.finished()) + b"\n\n" + DONE

    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,), service, timeline = outputs, self._service, self._timeline
        steps = [sample["tokens"] for sample in timeline["samples"]] or [[] for _ in output.outputs]
        choices = [
            picked(sample, "index", "text", "finish_reason", "stop_reason")
            | picked(sample.metrics, "time_to_first_token_ms", "end_to_end_ms")
            | {
                "tokens": [
                    {"token_id": token_id, "text": service.tokenizer.token_text(token_id)} | step
                    for token_id, step in zip(sample.token_ids, chain(steps[sample.index], repeat({})), strict=False)
                ],
            }
            for sample in output.outputs
        ]
        head = {"id": output.request_id, "model": service.reader.model_names[0], "seed": output.seed}
        why = [f"step {happened['step']}: {happened['why']}" for happened in timeline["events"]]
        return to_json({**head, "choices": choices, "why": why, "usage": usage_object(outputs)})


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are no text by themselves."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)


def _model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "forge",
        "root": service.ready.model_name,
        "max_model_len": service.ready.max_model_len,
    }
