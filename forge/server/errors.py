"""Errors as OpenAI's API shapes them, and the status that each kind has.

A client library retries 408, 409, 429 and 5xx. So what asking again cannot mend is never one of those: what a client
did wrong is 400, 401, 404, 405, 413 or 415. 429 and 503 say when to come back, and 500 is the engine's own fault.
"""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forge.errors import ForgeError
from forge.server.engine_client import EngineDead, FollowerStalled, RequestFailed, ShuttingDown

logger = logging.getLogger("forge.server")

_TYPES = {  # of all others: invalid_request_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(ForgeError):
    """An error with its status, the parameter that it is about and a name for programs."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`. Nothing of an unforeseen one but that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDead):
        return ApiError(str(error), 503, code="engine_dead", retry_after=5)
    if isinstance(error, ShuttingDown):
        return ApiError(str(error), 503, code="shutting_down", retry_after=5)
    if isinstance(error, RequestFailed | FollowerStalled):
        return ApiError(str(error), 500, code="request_failed")
    if isinstance(error, ForgeError):
        return ApiError(str(error))
    return ApiError("the server made a mistake; its log says which", 500, code="internal_error")


def error_object(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> JSONResponse:
    shown = to_api_error(error)
    headers = {} if shown.retry_after is None else {"retry-after": str(shown.retry_after)}
    if shown.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_object(shown), shown.status, headers)


def validation_error(errors: list[dict[str, Any]]) -> ApiError:
    """One line about the first thing that is wrong with a body."""
    first = next((error for error in errors if error["type"] == "too_long"), errors[0])
    place = [part for part in first["loc"][1:] if not isinstance(part, int)]
    param = str(place[0]) if place else None
    if first["type"] == "json_invalid":
        return ApiError("the body is not JSON", code="invalid_json")
    if param is None:
        return ApiError(first["msg"], code="invalid_json" if "json" in first["type"] else None)
    if len({error["loc"][2] for error in errors if len(error["loc"]) > 2 and error["loc"][1] == param}) > 1:
        return ApiError(f"{param} has none of the types that it may have", param=param)
    return ApiError(f"{param}: {first['msg']}"[:500], param=param)


def install_handlers(app: FastAPI) -> None:
    """Every error that leaves an endpoint becomes one in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(validation_error(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        found = error_response(ApiError(str(error.detail), error.status_code))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client has left

    @app.exception_handler(ForgeError)
    @app.exception_handler(Exception)
    async def on_any(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)
