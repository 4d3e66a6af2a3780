"""How many engines, and who chooses among them. Importing this loads no Ray."""

from dataclasses import dataclass
from importlib.util import find_spec

from forge.cluster.fleet import Fleet
from forge.cluster.routers import ROUTERS, new_router
from forge.errors import UsageError
from forge.option import option

_CLUSTER = "Many engines (Ray Serve)"


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a server with several engines. Raises `UsageError` for those that have no meaning."""

    replicas: int | None = option(None, "Engines that answer.", _CLUSTER)
    """With autoscaling, at least."""
    router: str = option("prefix", f"Who chooses one: {', '.join(ROUTERS)}.", _CLUSTER)
    prefill_replicas: int | None = option(None, "Engines that only compute prompts.", _CLUSTER)
    decode_replicas: int | None = option(None, "Engines that continue them.", _CLUSTER)
    max_replicas: int | None = option(None, "Scale up to so many by running requests.", _CLUSTER)
    target_requests: float = option(8.0, "Running requests per engine that scaling aims at.", _CLUSTER)
    ray_address: str | None = option(
        None, "A Ray cluster; local starts one here.", _CLUSTER, shown="the one that runs here, or local"
    )

    def __post_init__(self) -> None:
        new_router(self.router, Fleet())
        if (self.prefill_replicas is None) != (self.decode_replicas is None):
            raise UsageError("--prefill-replicas and --decode-replicas go together: give both")
        if self.replicas is not None and self.decode_replicas is not None:
            raise UsageError("with prefill apart from decode, --decode-replicas says how many engines answer")
        for name in ("replicas", "prefill_replicas", "decode_replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, and not {value}")
        if self.max_replicas is not None and self.max_replicas < self.answering:
            raise UsageError(f"--max-replicas {self.max_replicas} is less than the {self.answering} engines at least")
        if self.target_requests <= 0:
            raise UsageError(f"--target-requests must be above 0, and not {self.target_requests:g}")

    @property
    def answering(self) -> int:
        """Engines that answer; with autoscaling, at least."""
        return self.decode_replicas or self.replicas or 1

    @property
    def most(self) -> int:
        """Engines in all, at most."""
        return (self.max_replicas or self.answering) + (self.prefill_replicas or 0)


def require_ray() -> None:
    """Raises `UsageError` where Ray Serve is not installed."""
    if find_spec("ray") is None:
        raise UsageError("many engines need Ray Serve: pip install 'ray[serve]'")
