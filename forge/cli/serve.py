"""`forge serve`: an OpenAI-compatible server on one engine that all requests share, or on several behind a router; and
`forge engines` and `forge watch`, which change the engines of one that runs elsewhere, and show its steps."""

import json
import logging
import os
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from functools import partial
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from forge.cli.arguments import Takes, command, was_given
from forge.cluster.options import ClusterOptions, require_ray
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.server.settings import Limits, Settings, is_loopback
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord
from forge.views.palette import QUIET
from forge.views.summary import RunLabel
from forge.views.terminal import open_console, open_error_console
from forge.views.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forge.server.messages import Ready

ADDRESS_VARIABLE = "FORGE_ADDR"


@command
def serve(
    ctx: typer.Context,
    engine_args: Annotated[EngineArgs, Takes(kv="prefix", max_num_seqs=64)],
    server: Settings,
    limits: Limits,
    cluster: ClusterOptions,
    live: Annotated[
        bool, typer.Option("--live", help="Show every step as it happens.", rich_help_panel="Server")
    ] = False,
) -> int:
    """Serve a model over HTTP, as OpenAI's API has it.

    [dim]forge serve --model tales --port 8080[/dim]
    """
    require_server()
    from forge.server.serving import configure_logging
    from forge.server.serving import serve as run

    stated = (server.host if was_given(ctx, "host") else None, server.port if was_given(ctx, "port") else None)
    host, port = address(*stated, os.environ.get(ADDRESS_VARIABLE))
    model = str(engine_args.model)
    names = server.model_names or (() if Path(model).exists() else (model,))
    settings = replace(server, host=host, port=port, model_names=names, limits=limits)
    loading = {name: value for name, value in vars(engine_args).items() if name != "model"}
    configure_logging(server.access_log)
    if any(was_given(ctx, field.name) for field in fields(cluster)):
        require_ray()
        from forge.cluster.launch import serve_cluster

        run = partial(serve_cluster, cluster=cluster)
    with ExitStack() as shown:
        show = (lambda ready: _show(shown, ready, loading)) if live else None
        return run(model, loading, settings, show, partial(_say_ready, model))


def address(host: str | None, port: int | None, variable: str | None) -> tuple[str, int]:
    """Return where to listen: what was given, or else FORGE_ADDR (`host:port`), or else the default.

    Raises `UsageError` for a variable that is no address, and for a port that there cannot be.
    """
    if port is not None and not 0 <= port <= 65_535:
        raise UsageError(f"--port is a number from 0 to 65535, and not {port}")
    if host is not None or port is not None or not variable:
        return host or Settings.host, Settings.port if port is None else port
    name, _, number = variable.rpartition(":")
    if not number.isdigit() or int(number) > 65_535:
        raise UsageError(f"{ADDRESS_VARIABLE}={variable}: give host:port, such as {Settings.host}:{Settings.port}")
    return name.strip("[]") or Settings.host, int(number)


def require_server() -> None:
    """Raise `UsageError` if the libraries that speak HTTP are not installed."""
    missing = [name for name in ("fastapi", "uvicorn") if util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _show(shown: ExitStack, ready: "Ready", loading: dict[str, Any]) -> "Callable[[StepRecord], None]":
    """Return the function that is called with every step's record."""
    label = RunLabel(ready.model_name, ready.kv, ready.device, ready.device_description)
    traffic = Traffic(open_console(), label, loading["max_num_seqs"], loading["order"])
    return shown.enter_context(traffic).step


def _say_ready(model: str, url: str, ready: "Ready") -> None:
    log = logging.getLogger("forge.server").info
    log("%s is served at %s", model, url)
    sampling = ", ".join(f"{name} {value:g}" for name, value in ready.default_sampling.items())
    chosen = f"sampled as the file recommends: {sampling}" if sampling else "greedy"
    log("without sampling parameters a request is %s", chosen)


def engines(
    name: Annotated[str, typer.Argument(help="What the server is called: its --name.")],
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Engines that answer; with autoscaling, at least.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model that every engine loads, one after another.")
    ] = None,
) -> None:
    """Change how many engines a server has (Ray Serve), or their model. No request fails.

    [dim]forge engines tales --replicas 4[/dim]
    """
    from forge.cluster.control import Change, ask_for_change

    if replicas is None and model is None:
        raise UsageError("say what is to be different: --replicas, --model or both")
    if model is not None and Path(model).exists():
        model = str(Path(model).absolute())
    ask_for_change(name, Change(replicas, model))


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A forge server's address.")] = "http://127.0.0.1:8080",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="FORGE_API_KEY", help="What it asks for.")] = None,
) -> int:
    """Show every step of a server as it happens. Ctrl-C ends the watching; the server goes on.

    [dim]forge watch http://127.0.0.1:8080[/dim]
    """
    told = f"{url}: its steps as they happen; Ctrl-C ends the watching"
    with Traffic(open_console(), RunLabel(url, "", "", "")) as traffic:
        for record in steps_of(url, api_key, lambda: open_error_console().print(told, style=QUIET)):
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
