"""Whether Ray is installed."""

from importlib.util import find_spec

from forge.errors import UsageError


def require_ray() -> None:
    """Raises `UsageError` where Ray Serve is not installed."""
    if find_spec("ray") is None:
        raise UsageError("many engines need Ray Serve: pip install 'forge-llm[cluster]'")
