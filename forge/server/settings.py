"""How the server is set up: who may come in, how much of everything, and how long it may take."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, get_args

from forge.errors import UsageError
from forge.option import check_value, option

_DAY = 86_400.0
OnEngineDeath = Literal["exit", "restart"]
AccessLog = Literal["off", "text", "json"]


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Limits:
    """The limits of what a request may ask for."""

    max_queue: int = option(2048, "Unfinished prompts before 429.", "Limits")
    max_body_bytes: int = option(4 << 20, "Size of a request.", "Limits")
    max_prompts: int = 128
    max_choices: int = 256
    """Prompts times `n` of one request."""
    max_stop: int = 32
    max_stop_chars: int = 256
    max_stored_bytes: int = option(64 << 20, "Memory for stored responses; 0 stores none.", "Limits")
    """The least recently used are dropped. They are in memory only, and end with the server."""
    stall_timeout: float = option(30.0, "Seconds that a streaming client may stall.", "Limits")
    """Seconds for which it may take nothing before its request is aborted."""
    header_timeout: float = option(10.0, "Seconds for a request to arrive.", "Limits")
    """Seconds for a request's head, from the connection or the last answer on."""
    body_timeout: float = 30.0
    keep_alive: float = 15.0
    """Seconds that an idle connection stays open."""
    grace: float = option(10.0, "Seconds to finish after SIGTERM.", "Limits")
    step_timeout: float = option(60.0, "Seconds that a step may take before /health fails.", "Limits")
    """Longer than the longest step: on a CPU a prefill of a large model takes a while."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_queue"):
            check_value(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        check_value("max_stored_bytes", self.max_stored_bytes, self.max_stored_bytes >= 0, "at least 0")
        for name in ("header_timeout", "body_timeout", "keep_alive", "stall_timeout", "step_timeout"):
            check_value(name, getattr(self, name), 0 < getattr(self, name) <= _DAY, "above 0 and at most a day")
        check_value("grace", self.grace, 0 <= self.grace <= _DAY, "0 to a day")


@dataclass(frozen=True)
class Settings:
    """How a server runs: its address, its keys and its limits."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "Port to listen on; 0 takes any.")
    api_key: str | None = option(None, "What clients must send; /health is open.", "Server", envvar="FORGE_API_KEY")
    api_key_file: str | None = option(
        None, "A file of such keys, one to a line; a name may stand before a key.", "Server"
    )
    ssl_certfile: str | None = option(None, "Certificate chain (PEM), to serve HTTPS.", "Server")
    ssl_keyfile: str | None = option(None, "Its private key (PEM).", "Server")
    access_log: AccessLog = option("off", "A line per request on standard error: off, text or json.", "Server")
    allow_origins: tuple[str, ...] = option(
        (), "A web origin that may call; may be repeated.", "Server", flags="--allow-origin"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "A name that requests may be for; may be repeated.", "Server", flags="--allowed-host"
    )
    """Names that a request's `Host` may have beside `localhost`, an IP address and `host`."""
    debug_texts: bool = option(False, "Show clients' texts in /debug/steps.", "Server")
    model_names: tuple[str, ...] = option((), "What clients call the model.", "Server", flags="--served-model-name")
    """The first is what it calls itself."""
    log_interval: float = option(10.0, "Seconds between two lines about throughput; 0 for none.", "Server")
    on_engine_death: OnEngineDeath = option(
        "exit", "When the engine's process dies: exit, or restart another.", "Server"
    )
    """`exit` ends the server with status 1, `restart` starts another process."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_value("log_interval", self.log_interval, 0 <= self.log_interval <= _DAY, "0, for no lines, to a day")
        if self.access_log not in get_args(AccessLog):
            raise UsageError(f"--access-log is off, text or json, and not {self.access_log!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("--ssl-certfile and --ssl-keyfile go together: give both")
        if self.on_engine_death not in get_args(OnEngineDeath):
            raise UsageError(f"--on-engine-death is exit or restart, and not {self.on_engine_death!r}")
