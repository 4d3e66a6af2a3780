"""What may be chosen of the backends, by name. Loads nothing."""

import os

from forge.errors import UsageError

DEVICES = ("cpu", "reference", "cuda")
DEFAULT_DEVICE = "cpu"
KERNELS = ("triton", "torch")
"""The implementations of a forward pass on cuda."""
QUANTIZE_TYPES = ("q8_0",)
PACKED_WEIGHTS = "FORGE_PACKED_WEIGHTS"


def packed_weights_wanted() -> bool:
    """True if packed weights may be kept in a file: always, except if FORGE_PACKED_WEIGHTS is off. Raises `UsageError`
    for another value."""
    value = os.environ.get(PACKED_WEIGHTS, "")
    if value.lower() not in ("", "on", "1", "off", "0"):
        raise UsageError(f"{PACKED_WEIGHTS}={value}: give on or off")
    return value.lower() not in ("off", "0")
