"""`--device`: from a name to a backend, or to one line that says why not; and what a GPU's memory leaves for keys and
values once a model is loaded.

As in vLLM, `--gpu-memory-utilization` is the share of the device's memory that may be in use in all, other processes'
included; weights are there already, and what a step needs for a moment is left free.
"""

from collections.abc import Callable
from importlib.util import find_spec

from forge.backends.choices import DEVICES, KERNELS, QUANTIZE_TYPES
from forge.errors import UsageError
from forge.model.backend import Backend

LARGE_GPU_BYTES = 32 << 30


def create_backend(
    device: str,
    threads: int | None = None,
    quantize: str | None = None,
    on_compile: Callable[[int, int], None] | None = None,
    invariant: bool = False,
    kernels: str | None = None,
) -> Backend:
    """Create the backend for `device`.

    threads: how many threads a CPU backend runs; None means one per usable CPU. quantize: the type to which float
    weights are quantized as they are loaded. on_compile: called with (compiled, total) kernels. invariant: require that
    a row's bits never depend on its batch, which all but cuda promise anyway. kernels: `triton` or `torch`, for cuda;
    None means `triton`.

    Raises `UsageError` for an unknown one, or one that this machine cannot run.
    """
    check_device(device, quantize, kernels)
    if device == "cpu":
        from forge.backends.cpu.backend import CpuBackend

        return CpuBackend(threads, quantize, on_compile)
    if device == "reference":
        from forge.backends.reference import ReferenceBackend

        return ReferenceBackend()
    why_not = why_not_cuda()
    if why_not is not None:
        raise UsageError(why_not)
    from forge.backends.cuda.backend import CudaBackend

    return CudaBackend(invariant=invariant, quantize=quantize, kernels=kernels or "triton", on_compile=on_compile)


def check_device(device: str, quantize: str | None = None, kernels: str | None = None) -> None:
    """Raise `UsageError` for an unknown device or type, or for one that the device does not support. Loads nothing."""
    if quantize not in (None, *QUANTIZE_TYPES):
        raise UsageError(f"cannot quantize to {quantize!r}; there is {', '.join(QUANTIZE_TYPES)}")
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}; there are {', '.join(DEVICES)}")
    if kernels not in (None, *KERNELS):
        raise UsageError(f"unknown kernels {kernels!r}; there are {', '.join(KERNELS)}")


def kv_dtypes_of(device: str) -> tuple[str, ...]:
    """List the dtypes that a device can store keys and values in."""
    from forge.cache.kv_storage import KV_DTYPES

    return tuple(kv_dtype for kv_dtype in KV_DTYPES if device != "cuda" or kv_dtype != "int8")


def check_kv_dtype(kv_dtype: str, device: str) -> None:
    """Raise `UsageError` for an unknown KV dtype, and for one that the device does not support."""
    everywhere, here = kv_dtypes_of("cpu"), kv_dtypes_of(device)
    if kv_dtype not in everywhere:
        raise UsageError(f"unknown kv dtype {kv_dtype!r}; supported: {', '.join(everywhere)}")
    if kv_dtype not in here:
        raise UsageError(f"--kv-dtype {kv_dtype} is not for --device {device}: it has {', '.join(here)}")


def is_gpu(device: str) -> bool:
    """True for a GPU that can be used."""
    return device == "cuda" and why_not_cuda() is None


def is_large_gpu(device: str) -> bool:
    """True for a GPU with plenty of memory, such as a server's."""
    if not is_gpu(device):
        return False
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= LARGE_GPU_BYTES


def why_not_cuda() -> str | None:
    """Say in one line what `--device cuda` lacks here and what to do about it; None if it can run."""
    if find_spec("torch") is None:
        return "--device cuda needs PyTorch, which is not installed: pip install 'forge-llm[cuda]'"
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        return f"--device cuda needs an NVIDIA GPU with its driver, and PyTorch sees none here{built}: use --device cpu"
    if find_spec("triton") is None:
        return "--device cuda needs Triton, which is not installed: pip install 'forge-llm[cuda]'"
    return None


DEFAULT_UTILIZATION = 0.9
GRAPH_BYTES = 1 << 30
"""Memory left free for captured graphs, cuBLAS's workspace and fragments. Guess."""


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
