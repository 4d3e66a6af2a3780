"""How the server is set up: who may come in, how much of everything, and how long it may take."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

from forge.errors import UsageError

_DAY = 86_400.0


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most."""

    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    max_n: int = 16
    max_choices: int = 256
    """Prompts times `n` of one request."""
    max_stop: int = 4
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_queue: int = 2048
    """Unfinished prompts above which new ones are sent away with 429."""
    header_timeout: float = 10.0
    """Seconds for a request's head, from the connection or the last answer on."""
    body_timeout: float = 30.0
    keep_alive: float = 15.0
    """Seconds that an idle connection stays open."""
    stall_timeout: float = 30.0
    """Seconds that a streaming client may take nothing before its request is aborted."""
    grace: float = 10.0
    """Seconds that running requests have to finish after SIGTERM."""

    def __post_init__(self):
        for name in ("max_body_bytes", "max_queue"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("header_timeout", "body_timeout", "keep_alive", "stall_timeout"):
            _check(name, getattr(self, name), 0 < getattr(self, name) <= _DAY, "above 0 and at most a day")
        _check("grace", self.grace, 0 <= self.grace <= _DAY, "0 to a day")


@dataclass(frozen=True)
class Settings:
    """How a server runs: its address, its keys and its limits."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's `Host` may have beside `localhost`, an IP address and `host`."""
    debug_texts: bool = False
    """Whether `/debug/steps` shows the clients' token ids and texts."""
    model_names: tuple[str, ...] = ()
    """What clients may call the model; the first is what it calls itself."""
    log_interval: float = 10.0
    """Seconds between two lines about throughput; 0 for none."""
    on_engine_death: Literal["exit", "restart"] = "exit"
    """What the server does when the engine's process dies: exit with status 1, or start another."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        _check("log_interval", self.log_interval, 0 <= self.log_interval <= _DAY, "0, for no lines, to a day")


def _check(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} is {wanted}, and not {value:g}")
