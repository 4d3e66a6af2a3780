"""`forge serve`: an OpenAI-compatible server on one engine that all requests share."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forge.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from forge.server.messages import Ready
    from forge.trace.records import StepRecord

_SERVER, _SCHEDULER, _LIMITS, _CLUSTER = "Server", "Scheduler", "Limits", "Many engines (Ray Serve)"
ADDRESS_VARIABLE = "FORGE_ADDR"
OnEngineDeath = Literal["exit", "restart"]
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080


def serve(
    model: options.ModelOption = "tales",
    kv: options.KvOption = "prefix",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = None,
    num_blocks: options.NumBlocksOption = None,
    kv_memory: options.KvMemoryOption = None,
    gpu_memory_utilization: options.GpuMemoryUtilizationOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantize: options.QuantizeOption = None,
    invariant: options.InvariantOption = False,
    speculate: options.SpeculateOption = None,
    draft: options.DraftOption = None,
    k: options.KOption = None,
    acceptance: options.AcceptanceOption = None,
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
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", help="A name that requests may be for; may be repeated.", rich_help_panel=_SERVER
        ),
    ] = None,
    debug_texts: Annotated[
        bool, typer.Option("--debug-texts", help="Show clients' texts in /debug/steps.", rich_help_panel=_SERVER)
    ] = False,
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
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = None,
    order: options.OrderOption = None,
    preempt: options.PreemptOption = None,
    mode: options.ModeOption = None,
    check: options.CheckOption = False,
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
    on_engine_death: Annotated[
        OnEngineDeath,
        typer.Option("--on-engine-death", help="When the engine's process dies.", rich_help_panel=_SERVER),
    ] = "exit",
    log_interval: Annotated[
        float, typer.Option("--log-interval", help="Seconds between two lines; 0 for none.", rich_help_panel=_SERVER)
    ] = 10.0,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Engines that answer.", rich_help_panel=_CLUSTER)
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            "--router",
            help="round-robin, p2c, least-tokens, prefix or prefix-estimate.",
            show_default="prefix",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    prefill_replicas: Annotated[
        int | None,
        typer.Option("--prefill-replicas", help="Engines that only compute prompts.", rich_help_panel=_CLUSTER),
    ] = None,
    decode_replicas: Annotated[
        int | None,
        typer.Option("--decode-replicas", help="Engines that continue them.", rich_help_panel=_CLUSTER),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option("--max-replicas", help="Scale up to so many by running requests.", rich_help_panel=_CLUSTER),
    ] = None,
    target_requests: Annotated[
        float | None,
        typer.Option("--target-requests", help="Running requests per replica to aim at.", rich_help_panel=_CLUSTER),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="A Ray cluster; local starts one here.",
            show_default="the one that runs here, or local",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
) -> int:
    """Serve a model over HTTP, as OpenAI's API has it.

    [dim]forge serve --model tales --port 8080[/dim]
    """
    options.check_speculation(speculate, draft, k, acceptance)
    require_server()
    cluster = options.model_options(
        replicas=replicas,
        router=router,
        prefill_replicas=prefill_replicas,
        decode_replicas=decode_replicas,
        max_replicas=max_replicas,
        target_requests=target_requests,
        ray_address=ray_address,
    )
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
        allow_origins=tuple(allow_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        debug_texts=debug_texts,
        model_names=tuple(served_model_name or ([] if Path(model).exists() else [model])),
        log_interval=log_interval,
        on_engine_death=on_engine_death,
        limits=Limits(**limits),
    )
    loading = options.model_options(
        kv=kv,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_dtype=kv_dtype,
        quantize=quantize,
        invariant=invariant or None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        order=order,
        preempt=preempt,
        mode=mode,
        speculate=speculate,
        draft=draft,
        k=k,
        acceptance=acceptance,
        check=check,
    )
    configure_logging()
    if cluster:
        from forge.cluster.options import ClusterOptions, require_ray

        wanted = ClusterOptions(**cluster)
        require_ray()
        from forge.cluster.launch import serve_cluster

        run = partial(serve_cluster, wanted=wanted)
    if not live:
        return run(model, loading, settings, on_ready=_say_ready(model))
    with ExitStack() as shown:
        return run(model, loading, settings, lambda ready: _show(shown, ready, loading), _say_ready(model))


def address(host: str | None, port: int | None, variable: str | None) -> tuple[str, int]:
    """Where to listen: what was given, or else FORGE_ADDR (`host:port`), or else the default.

    Raises `UsageError` for a variable that is no address, and for a port that there cannot be.
    """
    from forge.errors import UsageError

    if port is not None and not 0 <= port <= 65_535:
        raise UsageError(f"--port is a number from 0 to 65535, and not {port}")
    if host is not None or port is not None or not variable:
        return host or DEFAULT_HOST, DEFAULT_PORT if port is None else port
    name, _, number = variable.rpartition(":")
    if not number.isdigit() or int(number) > 65_535:
        raise UsageError(f"{ADDRESS_VARIABLE}={variable}: give host:port, such as {DEFAULT_HOST}:{DEFAULT_PORT}")
    return name.strip("[]") or DEFAULT_HOST, int(number)


def require_server() -> None:
    """Raises `UsageError` where the libraries that speak HTTP are not installed."""
    from importlib.util import find_spec

    from forge.errors import UsageError

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _show(shown: ExitStack, ready: "Ready", loading: dict[str, Any]) -> "Callable[[StepRecord], None]":
    """What is called with every step's record."""
    from forge.views.summary import RunLabel
    from forge.views.terminal import open_console
    from forge.views.traffic import Traffic

    label = RunLabel(ready.model_name, ready.kv, ready.device, ready.device_description)
    traffic = Traffic(open_console(), label, loading["max_num_seqs"], loading.get("order", "fcfs"))
    return shown.enter_context(traffic).step


def _say_ready(model: str) -> "Callable[[str, Ready], None]":
    def say(url: str, ready: "Ready") -> None:
        import logging

        log = logging.getLogger("forge.server").info
        log("%s is served at %s", model, url)
        said = ", ".join(f"{name} {value:g}" for name, value in ready.default_sampling.items())
        log(
            "without sampling parameters a request is %s",
            f"sampled as the file recommends: {said}" if said else "greedy",
        )

    return say
