"""Sizes that follow from the GPU: what its memory leaves for keys and values once a model is loaded.

As in vLLM, `--gpu-memory-utilization` is the share of the device's memory that may be in use in all, other processes'
included; weights are there already, and what a step needs for a moment is left free.
"""

from forge.errors import UsageError

DEFAULT_UTILIZATION = 0.9
GRAPH_BYTES = 1 << 30
"""Left for captured graphs, cuBLAS's workspace and fragments. Guess."""


def kv_memory(utilization: float | None, temporary_bytes: int) -> int:
    """Return the bytes for keys and values on the current device. temporary_bytes: of the arrays of one step.

    Raises `UsageError` for an invalid share, and if no memory is left."""
    import torch  # options are checked without it

    utilization = checked_utilization(utilization)
    free, total = torch.cuda.mem_get_info()
    left = int(total * utilization) - (total - free) - temporary_bytes - GRAPH_BYTES
    if left <= 0:
        raise UsageError(
            f"--gpu-memory-utilization {utilization:g} of {total / 1e9:.1f} GB leaves nothing for the KV cache: "
            f"{(total - free) / 1e9:.1f} GB are in use with the model loaded, and a step needs "
            f"{(temporary_bytes + GRAPH_BYTES) / 1e9:.1f} GB: raise it, or lower --max-num-batched-tokens"
        )
    return left


def checked_utilization(utilization: float | None) -> float:
    """Return the share. Raises `UsageError` unless it is above 0 and at most 1."""
    if utilization is None:
        return DEFAULT_UTILIZATION
    if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
        raise UsageError(f"--gpu-memory-utilization is a share of memory above 0 and at most 1, got {utilization!r}")
    return float(utilization)
