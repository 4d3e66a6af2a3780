"""How many engines: as many as the sequences need that run and wait, which the engines tell."""

from math import ceil
from typing import Any


def by_sequences(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: its `AutoscalingContext` to the number of replicas that there should be.

    Between `min_replicas` and `max_replicas`, and its delays, Serve keeps to itself.
    """
    told = (context.aggregated_metrics or {}).get("sequences", {})
    sequences = sum(told.values())
    return wanted_replicas(sequences, context.config.get_target_ongoing_requests()), {}


def wanted_replicas(sequences: float, target: float) -> int:
    """Replicas for so many sequences, `target` of them each; one at least."""
    return max(1, ceil(sequences / target - 1e-9))
