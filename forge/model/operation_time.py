"""What `time_operations` measures: the time of each operation in each layer, and the arrays that it read and wrote."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """An array that an operation reads or writes."""

    shape: tuple[int, ...]
    nbytes: int
    """Bytes that are read or written, each counted once."""


@dataclass(frozen=True)
class OperationTime:
    """How long one operation took in one layer, summed over all forwards since timing began."""

    layer: int
    """-1 for what comes before the first layer or after the last."""
    operation: str
    """`attention`, `rope`, …; for a matrix product the weight's name, such as `ffn_gate`. A layer may have several of
    one name."""
    ms: float
    calls: int
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    """The arrays that the last call read and wrote; empty if the backend does not count them."""
