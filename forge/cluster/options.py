"""How many engines, who chooses among them, and what Ray is asked for. Importing this loads no Ray."""

import re
from dataclasses import dataclass
from importlib.util import find_spec

from forge.cluster.fleet import Fleet
from forge.cluster.routers import DEFAULT_THRESHOLD, ROUTERS, new_router
from forge.errors import UsageError
from forge.option import check_value, flag_of, option

_CLUSTER = "Many engines (Ray Serve)"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a server with several engines. Raises `UsageError` for those that have no meaning."""

    replicas: int | None = option(None, "Engines that answer.", _CLUSTER)
    """With autoscaling, at least."""
    router: str = option("prefix", f"Who chooses one: {', '.join(ROUTERS)}.", _CLUSTER)
    prefix_threshold: int = option(
        DEFAULT_THRESHOLD, "Prompt tokens by which a prefix's holder may be busier than the least busy.", _CLUSTER
    )
    prefill_replicas: int | None = option(None, "Engines that only compute prompts.", _CLUSTER)
    decode_replicas: int | None = option(None, "Engines that continue them.", _CLUSTER)
    max_replicas: int | None = option(None, "Scale up to so many by running requests.", _CLUSTER)
    target_requests: float = option(8.0, "Running requests per engine that scaling aims at.", _CLUSTER)
    upscale_delay: float = option(10.0, "Seconds of more requests before an engine is added.", _CLUSTER)
    downscale_delay: float = option(120.0, "Seconds of fewer requests before one is taken away.", _CLUSTER)
    start_timeout: float = option(600.0, "Seconds in which an engine must have started.", _CLUSTER)
    name: str | None = option(None, "What the server is called on Ray.", _CLUSTER, shown="the model's, and a number")
    attach: str | None = option(None, "Be another front of the engines of the server of this name.", _CLUSTER)
    keep_engines: bool = option(False, "Leave the engines running at the end, for --attach.", _CLUSTER)
    reuse_port: bool = option(False, "Share the port with other fronts that have this option.", _CLUSTER)
    ray_address: str | None = option(
        None, "A Ray cluster; local starts one here.", _CLUSTER, shown="that of ray start, or local"
    )

    def __post_init__(self) -> None:
        new_router(self.router, Fleet())
        if (self.prefill_replicas is None) != (self.decode_replicas is None):
            raise UsageError("--prefill-replicas and --decode-replicas go together: give both")
        if self.replicas is not None and self.decode_replicas is not None:
            raise UsageError("with prefill apart from decode, --decode-replicas says how many engines answer")
        for name in ("replicas", "prefill_replicas", "decode_replicas"):
            value = getattr(self, name)
            if value is not None:
                check_value(name, value, value >= 1, "at least 1")
            if value is not None and self.attach is not None:
                raise UsageError(f"--attach takes the engines that run: leave {flag_of(name)} out")
        if self.max_replicas is not None and self.max_replicas < self.answering:
            raise UsageError(f"--max-replicas {self.max_replicas} is less than the {self.answering} engines at least")
        for name in ("target_requests", "start_timeout"):
            check_value(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in ("upscale_delay", "downscale_delay", "prefix_threshold"):
            check_value(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("name", "attach"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise UsageError(f"--{name} is up to 40 small letters, digits, dots and dashes, and not {value!r:.60}")
        if self.name is not None and self.attach is not None:
            raise UsageError("--attach takes the name of the server that it joins: leave --name out")
        if self.keep_engines and self.ray_address == "local":
            raise UsageError("--keep-engines needs a Ray that outlives this command: ray start --head makes one")

    def check_cache(self, kv: str) -> None:
        """Raise `UsageError` for engines whose KV cache, `kv`, cannot do what is asked of it."""
        if new_router(self.router, Fleet()).needs_events and kv != "prefix":
            reads = f"--router {self.router} reads what prefix caches tell"
            raise UsageError(f"{reads}: give --kv prefix, or another router")
        if self.prefill_replicas and kv == "off":
            raise UsageError("--prefill-replicas hand KV caches over: give --kv basic, paged or prefix")

    @property
    def answering(self) -> int:
        """The number of engines that answer; with autoscaling, at least."""
        return self.decode_replicas or self.replicas or 1

    @property
    def most(self) -> int:
        """The number of engines in all, at most."""
        return (self.max_replicas or self.answering) + (self.prefill_replicas or 0)


def require_ray() -> None:
    """Raise `UsageError` if Ray Serve is not installed."""
    if find_spec("ray") is None:
        raise UsageError("many engines need Ray Serve: pip install 'ray[serve]'")
