"""Running the server: the listening socket, uvicorn on it, the engine beside it, and an orderly end.

SIGTERM or Ctrl-C: no new work is taken, what runs may finish within the grace time, the rest is aborted, and the
process exits with 0. A second signal does not wait. When the engine's process dies, its requests end with an error and
the server exits with 1, or starts another engine (`--on-engine-death`).
"""

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn

from forge.errors import ForgeError, UsageError
from forge.server.app import create_app
from forge.server.engine_client import EngineClient, ProcessClient
from forge.server.errors import ShuttingDown
from forge.server.exchange import Exchanges, WithRequestId, access
from forge.server.http_protocol import HttpProtocol
from forge.server.messages import Ready
from forge.server.metrics import Metrics, ThroughputLine
from forge.server.middleware import Keys
from forge.server.service import Service
from forge.server.settings import AccessLog, Settings, is_loopback
from forge.trace.records import StepRecord

logger = logging.getLogger("forge.server")

_COLLECT_EVERY = 20_000
"""New objects between two collections. A burst of requests makes some 10,000, and leaves no circles of them."""

_SWITCH_EVERY = 0.001
"""Seconds that a thread beside the loop may keep the interpreter's lock from it: each system call of the loop waits so
long behind one that encodes a text."""

_OTHER_FILES = 64
"""Open files that are no connections."""
_QUEUE = 4096
"""Connections that may wait to be accepted, as far as the system lets them: those above it try again in a second."""
_END_BY_FORCE = 2.0
"""Seconds after the grace time in which a server ends by itself."""
_LAST_ANSWERS = 0.3
"""Seconds in which aborted requests are answered."""
_ON_DEATH = {"exit": "the server exits", "restart": "starting another"}


OnReady = Callable[[str, Ready], None]
"""Called with the server's address and what is served."""


def serve(
    model: str,
    options: dict[str, Any],
    settings: Settings,
    live: Callable[[Ready], Callable[[StepRecord], None]] | None,
    on_ready: OnReady,
) -> int:
    """Serve until a signal; return the exit status.

    `options` are keyword arguments of `LLM`. `live` is told what is served and gives what is called with every step's
    record; `on_ready` is given the server's address and what is served, once it answers. Raises the `ForgeError` of a
    model that cannot be loaded, or an address that cannot be had.
    """
    listening = listen(settings)
    client = ProcessClient(model, options)
    try:
        ready = client.wait_until_ready()
        client.metrics = Metrics(ready)
        client.on_record = live(ready) if live is not None else None
        return asyncio.run(serve_client(client, ready, settings, listening, on_ready))
    finally:
        client.close()
        listening.close()


def listen(settings: Settings, share: bool = False) -> socket.socket:
    """Bind a socket to the address; `share` it with other processes that do. Raises `UsageError` if it cannot be had,
    and for keys and certificates that cannot be read."""
    has_keys = Keys(settings.api_key, settings.api_key_file).are_needed
    _check_certificate(settings)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None
    if not has_keys and not is_loopback(settings.host):
        logger.warning("%s can be reached from other machines and there is no --api-key", settings.host)
    return listening


def _check_certificate(settings: Settings) -> None:
    """Raise `UsageError` unless certificate and key are a pair that can be read."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # SSLError is one
        files = f"--ssl-certfile {settings.ssl_certfile} --ssl-keyfile {settings.ssl_keyfile}"
        raise UsageError(f"{files}: {error.strerror or error}") from None


def start_listening(listening: socket.socket, settings: Settings, backlog: int) -> None:
    """Accept connections from now on. Raises `UsageError` if another process has begun to since `listen`."""
    try:
        listening.listen(backlog)
    except OSError as error:
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None


def connection_limits() -> tuple[int, int]:
    """Return how many connections may be open and how many may wait to be accepted, with as many open files as the
    system allows this process: the usual soft limit is 1,024. Without a file to spare asyncio would log each failed
    accept."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536) if hard > 0 else 65_536, hard))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backlog = min(2048, most // 16)  # a turn of the loop accepts so many, and a refused one takes some turns to close
    return max(1, most - 5 * backlog - _OTHER_FILES), backlog


async def serve_client(
    client: EngineClient, ready: Ready, settings: Settings, listening: socket.socket, on_ready: OnReady
) -> int:
    """Serve from an engine, or from what stands for one, until a signal; return the exit status."""
    max_connections, backlog = connection_limits()
    start_listening(listening, settings, backlog)
    await client.connect()
    app = create_app(client, ready, settings)
    gc.collect()
    gc.freeze()  # what stays (libraries, vocabulary, app) no collection has to look at
    gc.set_threshold(_COLLECT_EVERY)
    sys.setswitchinterval(_SWITCH_EVERY)
    service = app.state.service
    server = _Server(
        uvicorn.Config(
            app.state.exchanges,
            http=partial(  # type: ignore[arg-type]  # is called as the class is
                HttpProtocol,
                header_timeout=settings.limits.header_timeout,
                max_connections=max_connections,
                num_surplus=backlog,
                on_refused=service.http.take_refused_connection,
            ),
            ws="none",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=settings.limits.keep_alive,  # type: ignore[arg-type]  # a fraction of a second works too
            timeout_graceful_shutdown=1,
            backlog=backlog,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
    )
    connections = server.server_state.connections
    service.has_room_for_connections = lambda: len(connections) < max_connections
    ending = _Ending(service, server, app.state.exchanges)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.begin)
    loop.add_signal_handler(signal.SIGHUP, _load_keys, service.keys)
    tasks = [asyncio.create_task(_log_throughput(service, settings.log_interval))]
    if isinstance(client, ProcessClient):
        tasks.append(asyncio.create_task(_follow_engine(client, server, settings.on_engine_death)))
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    server.on_started = lambda: on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", ready)
    try:
        await server.serve([listening])
        return 1 if client.dead else 0
    finally:
        for task in tasks:
            task.cancel()
        service.reader.grammars.close()
        client.disconnect()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours know of the engine."""

    on_started: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)  # uvicorn's `backlog` is also how many are accepted in a turn of the loop
        self.on_started()


class _Ending:
    """The orderly end of a server, from the first signal on."""

    def __init__(self, service: Service, server: uvicorn.Server, exchanges: Exchanges):
        self._service, self._server, self._exchanges = service, server, exchanges
        self._client, self._grace = service.client, service.limits.grace
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is not None:
            self._hurry.set()
            self._end_by_force(_END_BY_FORCE)
            return
        self._service.draining.set()
        self._end_by_force(self._grace + _END_BY_FORCE)
        self._task = asyncio.create_task(self._end())

    def _end_by_force(self, after: float) -> None:
        """End this process and the engine's in `after` seconds. Of a cluster Ray ends the processes."""
        if isinstance(self._client, ProcessClient):
            self._client.end_by_force(after)

    @property
    def _num_running(self) -> int:
        return max(self._exchanges.num_open - self._service.steps.num_subscribers, 0)

    async def _end(self) -> None:
        deadline = time.monotonic() + self._grace
        running = self._num_running
        logger.info("draining %d: requests that run have %g s to end, new ones are refused", running, self._grace)
        while self._num_running and not self._hurry.is_set() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), 0.05)
        if self._num_running:
            logger.warning("%d requests have not ended: they are aborted", self._num_running)
        self._client.abort_all(ShuttingDown())
        self._client.end_records()
        self._server.should_exit = True
        await asyncio.sleep(_LAST_ANSWERS)
        self._exchanges.end_all()


def _load_keys(keys: Keys) -> None:
    """Read the file of keys again. If it cannot be read, the keys stay as they are."""
    try:
        logger.info("%d API keys", keys.load())
    except UsageError as error:
        logger.error("%s: the keys stay as they were", error)


async def _follow_engine(client: ProcessClient, server: uvicorn.Server, on_death: str) -> None:
    """Wait for the death of the engine's process: log it in one line, then end the server or start another engine."""
    while True:
        await client.died.wait()
        await asyncio.to_thread(client.process.join, 2)
        code = client.process.exitcode
        how = "its socket closed" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"
        logger.error("the engine's process %d died (%s): %s", client.process.pid, how, _ON_DEATH[on_death])
        if on_death == "exit":
            break
        try:
            await client.restart()
        except ForgeError as error:
            logger.error("the engine does not start again (%s): the server exits", error)
            break
        logger.info("the engine runs again")
    server.should_exit = True


async def _log_throughput(service: Service, interval: float) -> None:
    if not interval:
        return
    line = ThroughputLine(service.metrics)
    while True:
        text = line.line(time.monotonic())
        if text is not None:
            logger.info(text)
        await asyncio.sleep(interval)


class OncePerSecond(logging.Filter):
    """Lets a warning or an error through once per second, so that what goes wrong in a loop does not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = record.getMessage()
        if record.created - self._last.get(key, 0.0) < 1.0:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[key] = record.created
        return True


def configure_logging(access_log: AccessLog = "off") -> None:
    """Log lines to standard error, in the form that the field's servers have; those of a request begin with its id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(OncePerSecond())
    handler.addFilter(WithRequestId())
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(request)s%(message)s", "%m-%d %H:%M:%S"))
    for name, level in (("forge", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        named = logging.getLogger(name)
        named.handlers, named.level = [handler], level
    lines = logging.StreamHandler(sys.stderr)  # whose records have a form of their own
    form = "%(message)s" if access_log == "json" else "%(levelname)s %(asctime)s %(message)s"
    lines.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
    access.handlers, access.propagate = [lines], False
