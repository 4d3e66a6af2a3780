"""What this GPU can do at most: bytes per second, and bfloat16 multiplications per second.

Memory: copying an array far larger than any cache onto another, read and write counted; and finding the largest number
of one, which only reads, as a decode step only reads its weights. Arithmetic: a large square product through cuBLAS.
The fastest of many passes counts, because a limit is what is possible.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from forge.bench.worker import Missing, serve_requests


def measure(array_bytes: int, seconds: float, side: int = 8192) -> Mapping[str, Any]:
    torch = import_torch()
    source = torch.ones(array_bytes // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    words = source.view(torch.int64)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "copy_bytes_per_second": 2 * source.nbytes / fastest(torch, lambda: target.copy_(source), seconds),
        "read_bytes_per_second": source.nbytes / fastest(torch, lambda: words.max(), seconds),
        "products_per_second": side**3 / fastest(torch, lambda: torch.mm(left, right), seconds),
    }


def import_torch():
    """Return torch, if it sees a GPU. Raises `Missing`."""
    try:
        import torch
    except Exception as error:  # a shared library that does not load raises what it likes
        raise Missing(f"torch is not importable: {error}") from None
    if not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU")
    return torch


def fastest(torch, work: Callable[[], object], seconds: float) -> float:
    """Return the least seconds of one call of `work`, of passes over about `seconds`, by the device's own clock."""
    best, spent = float("inf"), 0.0
    work()
    while spent < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end) / 1e3
        best, spent = min(best, taken / 10), spent + taken
    return best


if __name__ == "__main__":
    serve_requests(SimpleNamespace(measure=measure))
