"""`forge serve`: an OpenAI-compatible server on one engine that all requests share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from forge.server.messages import Ready
    from forge.trace.records import StepRecord

_SERVER, _SCHEDULER, _LIMITS = "Server", "Scheduler", "Limits"
ADDRESS_VARIABLE = "FORGE_ADDR"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080


def serve(
    model: options.ModelOption = "tales",
    kv: Annotated[
        str, typer.Option("--kv", help="KV cache: off, basic, paged or prefix.", rich_help_panel="Model")
    ] = "prefix",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", help="KV blocks in the pool.", rich_help_panel="Model")
    ] = None,
    kv_memory: Annotated[
        int | None, typer.Option("--kv-memory", help="The same in bytes.", rich_help_panel="Model")
    ] = None,
    kv_dtype: options.KvDtypeOption = None,
    quantize: options.QuantizeOption = None,
    speculate: Annotated[
        str | None,
        typer.Option("--speculate", help="Who guesses ahead: draft or ngram.", rich_help_panel=_SCHEDULER),
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="The draft model.", rich_help_panel=_SCHEDULER)] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Tokens to guess at a time, at most.", rich_help_panel=_SCHEDULER)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on.", show_default=DEFAULT_HOST, rich_help_panel=_SERVER),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="0 takes any.", show_default=str(DEFAULT_PORT), rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="What clients must send; /health is open.",
            envvar="FORGE_API_KEY",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="A web origin that may call; may be repeated.", rich_help_panel=_SERVER),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="What clients call the model.", rich_help_panel=_SERVER),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show every step as it happens.", rich_help_panel=_SERVER)
    ] = False,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences that run at once.", rich_help_panel=_SCHEDULER)
    ] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens that a step computes.", rich_help_panel=_SCHEDULER),
    ] = None,
    order: Annotated[str | None, typer.Option("--order", help="fcfs or priority.", rich_help_panel=_SCHEDULER)] = None,
    preempt: Annotated[
        str | None, typer.Option("--preempt", help="lifo or least-progressed.", rich_help_panel=_SCHEDULER)
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="recompute or swap what a victim had.", rich_help_panel=_SCHEDULER)
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option("--max-queue", help="Unfinished prompts before 429.", rich_help_panel=_LIMITS)
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option("--max-body-bytes", help="Size of a request.", rich_help_panel=_LIMITS)
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option("--stall-timeout", help="Seconds that a streaming client may stall.", rich_help_panel=_LIMITS),
    ] = None,
    header_timeout: Annotated[
        float | None,
        typer.Option("--header-timeout", help="Seconds for a request to arrive.", rich_help_panel=_LIMITS),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option("--grace", help="Seconds to finish after SIGTERM.", rich_help_panel=_LIMITS),
    ] = None,
    log_interval: Annotated[
        float, typer.Option("--log-interval", help="Seconds between two lines; 0 for none.", rich_help_panel=_SERVER)
    ] = 10.0,
) -> int:
    """Serve a model over HTTP, as OpenAI's API has it.

    [dim]forge serve --model tales --port 8080[/dim]
    """
    _require_server()
    from forge.server.serving import configure_logging
    from forge.server.serving import serve as run
    from forge.server.settings import Limits, Settings

    host, port = address(host, port, os.environ.get(ADDRESS_VARIABLE))
    limits = options.model_options(
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        stall_timeout=stall_timeout,
        header_timeout=header_timeout,
        grace=grace,
    )
    settings = Settings(
        host,
        port,
        api_key,
        tuple(allow_origin or ()),
        tuple(served_model_name or ([] if Path(model).exists() else [model])),
        log_interval,
        Limits(**limits),
    )
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        order=order,
        preempt=preempt,
        mode=mode,
        speculate=speculate,
        draft=draft,
        k=k,
    )
    configure_logging()
    return run(model, loading, settings, live_view if live else None, _say_ready(model))


def address(host: str | None, port: int | None, variable: str | None) -> tuple[str, int]:
    """Where to listen: what was given, or else FORGE_ADDR (`host:port`), or else the default.

    Raises `UsageError` for a variable that is no address.
    """
    from forge.errors import UsageError

    if host is not None or port is not None or not variable:
        return host or DEFAULT_HOST, DEFAULT_PORT if port is None else port
    name, _, number = variable.rpartition(":")
    if not number.isdigit() or int(number) > 65_535:
        raise UsageError(f"{ADDRESS_VARIABLE}={variable}: give host:port, such as {DEFAULT_HOST}:{DEFAULT_PORT}")
    return name.strip("[]") or DEFAULT_HOST, int(number)


def _require_server() -> None:
    """Raises `UsageError` where the libraries that speak HTTP are not installed."""
    from importlib.util import find_spec

    from forge.errors import UsageError

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {' and '.join(missing)}: pip install 'forge-llm[serve]'")


def live_view(ready: "Ready") -> "Callable[[StepRecord], None]":
    """What is called with every step's record: one line per step on standard output."""
    from forge.views.steps import print_step
    from forge.views.terminal import open_console

    console = open_console()
    return lambda record: print_step(console, record)


def _say_ready(model: str) -> "Callable[[str], None]":
    def say(url: str) -> None:
        import logging

        logging.getLogger("forge.server").info("%s is served at %s", model, url)

    return say
