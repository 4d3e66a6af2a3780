"""Bodies as JSON is defined: UTF-8, no NaN, no infinity, and no deeper than can be read."""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException


class StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return json.loads((await self.body()).decode(), parse_constant=_refuse)
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
    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Any:
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")
