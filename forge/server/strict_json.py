"""Bodies as JSON is defined: UTF-8, no NaN, no infinity, no half characters, and no deeper than can be read.

A body that does not say it is JSON is refused: a page in a browser may send any other kind to this machine without
asking first. `JsonAnswer` writes bodies.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

try:  # an event in 1 µs instead of 10
    from orjson import dumps as to_json
except ImportError:
    _ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

    def to_json(value: Any, /) -> bytes:  # type: ignore[misc]  # orjson's has further, optional parameters
        return _ENCODER.encode(value).encode()


class JsonAnswer(Response):
    """A body that `to_json` has made."""

    media_type = "application/json"


class StrictRequest(Request):
    """A request whose body is parsed as strict JSON: no NaN, no infinity, bounded depth."""

    async def json(self) -> Any:
        try:
            text = (await self.body()).decode()
            found = json.loads(text, parse_constant=_refuse)
            if "\\u" in text:  # only an escape can bring half of a surrogate pair
                json.dumps(found, ensure_ascii=False).encode()
            return found
        except UnicodeEncodeError:
            problem = "an escape in it is half of a surrogate pair"
        except UnicodeDecodeError:
            problem = "it is not UTF-8"
        except RecursionError:
            problem = "it is nested too deeply"
        except json.JSONDecodeError as error:
            problem = f"{error.msg} at character {error.pos}"
        except ValueError as error:  # a constant that JSON does not have, an integer of thousands of digits
            problem = str(error).partition(";")[0]
        raise HTTPException(400, f"the body is not JSON: {problem}")


class StrictRoute(APIRoute):
    """A route whose requests are `StrictRequest`s."""

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Any:
            if request.method == "POST" and not _says_json(request.headers.get("content-type", "")):
                raise HTTPException(415, "send the body as JSON, with the header content-type: application/json")
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly


def _says_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")
