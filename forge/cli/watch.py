"""`forge watch URL`: the steps of a server that runs elsewhere, as `forge serve --live` shows its own."""

import json
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from forge.errors import UsageError
from forge.server.settings import is_loopback
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord
from forge.views.palette import QUIET
from forge.views.summary import RunLabel
from forge.views.terminal import open_console, open_error_console
from forge.views.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A forge server's address.")] = "http://127.0.0.1:8080",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="FORGE_API_KEY", help="What it asks for.")] = None,
) -> int:
    """Show every step of a server as it happens. Ctrl-C ends the watching; the server goes on.

    [dim]forge watch http://127.0.0.1:8080[/dim]
    """

    def say() -> None:
        open_error_console().print(f"{url}: its steps as they happen; Ctrl-C ends the watching", style=QUIET)

    with Traffic(open_console(), RunLabel(url, "", "", "")) as traffic:
        for record in steps_of(url, api_key, say):
            traffic.step(record)
    return 0


def steps_of(url: str, api_key: str | None, opened: "Callable[[], None] | None" = None) -> "Iterator[StepRecord]":
    """Yield the steps of the server at `url` from now on, until it ends. Raises `UsageError` if it gives none.

    opened: called once the server has answered, before its first step.
    """
    decode = codec_of(StepRecord).decode
    address = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1") + "/debug/steps"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        is_here = is_loopback(urlsplit(address).hostname or "")
        proxies = urllib.request.ProxyHandler({} if is_here else None)  # a proxy's 127.0.0.1 is another machine
        with urllib.request.build_opener(proxies).open(urllib.request.Request(address, headers=headers)) as answer:
            if opened is not None:
                opened()
            for line in answer:
                if line.startswith(b"data: {"):
                    yield decode(json.loads(line[6:]), "step")
    except (OSError, ValueError) as error:
        raise UsageError(f"{url} shows no steps: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the server's own message, if it sent one of forge's."""
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        return json.loads(error.read())["error"]["message"]  # type: ignore[attr-defined]  # an `HTTPError` is an answer
    return str(getattr(error, "reason", None) or error)
