"""Errors as OpenAI's API shapes them, and the status that each kind has.

A client library retries 408, 409, 429 and 5xx. So what asking again cannot mend is never one of those: what a client
did wrong is 400, 401, 404, 405, 413 or 415. 429 and 503 say when to come back, and 500 is the engine's own fault.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forge.errors import ForgeError

CLIENT_LEFT = 499
"""The status of a request whose client left before its answer, as nginx has it."""
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


class EngineDead(ApiError):
    """No engine answers: its process is gone."""

    def __init__(self, message: str = "the engine's process has died"):
        super().__init__(message, 503, code="engine_dead", retry_after=5)


class ShuttingDown(ApiError):
    """The server is shutting down: another one may take the request."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", 503, code="shutting_down", retry_after=5)


class RequestFailed(ApiError):
    """The engine could not finish a request, and that is its own fault."""

    def __init__(self, message: str):
        super().__init__(message, 500, code="request_failed")


class ClientStalled(RequestFailed):
    """A client did not take what was generated for it."""


def to_api_error(error: Exception) -> ApiError:
    """Return what a client is told of `error`. Of an unforeseen one it says only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ForgeError):
        return ApiError(str(error))
    return ApiError("the server made a mistake; its log says which", 500, code="internal_error")


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Re-raise an error about a parameter in `names` under the name that the client knows it by, within this
    context."""
    try:
        yield
    except ApiError as error:
        name = names.get(error.param or "")
        if name is None or error.code == "unsupported_parameter":
            raise
        message = str(error).replace(error.param or "", name)
        raise ApiError(message, error.status, param=name, code=error.code, retry_after=error.retry_after) from None


def error_object(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object; with `type` beside it, which Anthropic's has."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> JSONResponse:
    shown = to_api_error(error)
    headers = {} if shown.retry_after is None else {"retry-after": str(shown.retry_after)}
    if shown.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_object(shown), shown.status, headers)


def validation_error(errors: list[dict[str, Any]]) -> ApiError:
    """Describe the first mistake in a body in one line."""
    first = next((error for error in errors if error["type"] == "too_long"), errors[0])
    place = [part for part in first["loc"][1:] if not isinstance(part, int)]
    param = str(place[0]) if place else None
    if first["type"] == "extra_forbidden":
        name = ".".join(place)
        return ApiError(f"{name} is not supported by this server", param=param, code="unsupported_parameter")
    if first["type"] == "json_invalid":
        return ApiError("the body is not JSON", code="invalid_json")
    if param is None:
        return ApiError(first["msg"], code="invalid_json" if "json" in first["type"] else None)
    if len({error["loc"][2] for error in errors if len(error["loc"]) > 2 and error["loc"][1] == param}) > 1:
        return ApiError(f"{param} has none of the types that it may have", param=param)
    return ApiError(f"{param}: {first['msg']}"[:500], param=param)


def _explained(request: Request, error: HTTPException) -> str:
    """Return the framework's words, or what exists instead of a missing route or method."""
    path, routes = request.scope["path"], [route for route in request.app.routes if isinstance(route, APIRoute)]
    if error.status_code == 405:
        methods = sorted({method for route in routes if route.path_regex.match(path) for method in route.methods or ()})
        return f"{path[:80]} takes {' and '.join(methods)}, not {request.method}"
    if error.status_code != 404 or error.detail != HTTPException(404).detail:
        return str(error.detail)
    names = list(dict.fromkeys(route.path for route in routes if route.include_in_schema))
    nearest = get_close_matches(path, names, 3, 0.6) or names
    return f"there is no {path[:80]} here; there is {', '.join(nearest)}"


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer with an error that left an endpoint, in OpenAI's shape."""
    match error:
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case RequestValidationError():
            return error_response(validation_error(list(error.errors())))
        case HTTPException():
            response = error_response(ApiError(_explained(request, error), error.status_code))
            response.headers.update(error.headers or {})
            return response
    return error_response(error)


ERRORS = (RequestValidationError, HTTPException, ClientDisconnect, ForgeError, Exception)
"""The kinds that the framework looks for a handler of."""
