"""Compiling the kernels for a GPU that is not there: what a model would launch, listed and compiled.

`launched_by` runs a model of real sizes on torch's `meta` device, where arrays have shapes and no memory, and hands
every launch to a listener. So what is compiled is what would run, in the same tiles and dtypes, with nothing kept in
step by hand. `compile_for` makes machine code of one launch and reads from it what the kernel occupies.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.sampling import list_draws
from forge.gguf import GGMLType
from forge.gguf.ggml_types import row_nbytes
from forge.model.config import Qwen3Config, expected_tensors
from forge.model.forward_batch import ForwardBatch
from forge.model.loader import load_qwen3
from forge.model.qwen3 import Qwen3
from forge.model.weight_source import WeightSource

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """A kernel in one specialization."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Argument → type, in order."""
    aligned: tuple[int, ...]
    """Arguments that are multiples of 16, or pointers to such addresses."""
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    @property
    def label(self) -> str:
        """The kernel, with what it fuses."""
        flags = dict(self.constants)
        parts = [word for flag, word in _FUSED.items() if flags.get(flag)]
        return " + ".join([_PLAIN_NAMES.get(self.kernel.__name__, self.kernel.__name__), *parts])

    @property
    def name(self) -> str:
        """The kernel, with what distinguishes this specialization."""
        short = {name: value for name, value in self.constants if value is not False}
        return f"{self.kernel.__name__}({', '.join(f'{name}={value}' for name, value in short.items())})"


_FUSED = {"NORM": "RMSNorm", "GLU": "SwiGLU", "ADD": "residual"}
"""What a product may have fused into it, by the constant that says so."""
_PLAIN_NAMES = {
    "argmax_rows": "argmax",
    "gumbel_argmax": "draw",
    "gather_rows": "embedding",
    "norm_rope_store": "head norm, RoPE, KV write",
}


@dataclass(frozen=True)
class Occupied:
    """The resources of a multiprocessor that a compiled kernel takes."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread that did not fit into registers."""
    shared: int
    """Bytes of shared memory per program."""
    early: tuple[str, ...]
    """Arguments whose memory it reads before it waits for the kernel before it; none where it does not wait."""


def launched_by(
    config: Qwen3Config, tensor_type: GGMLType, batches: Sequence[ForwardBatch], block_size: int = 16, **options: Any
) -> list[Launch]:
    """List every launch of a model of that size over `batches`, each specialization once, in order of first use.

    options: of `CudaBackend`.
    """
    listed: dict[Launch, None] = {}
    model = weightless_model(config, tensor_type, listed.setdefault, **options)
    assert isinstance(model.backend, CudaBackend)
    layout = model.kv_layout(1024, block_size, model.backend.default_kv_dtype)
    storage = model.backend.new_storage(layout)
    for batch in batches:
        model.backend.launch(model.forward_pass, batch, storage)
    list_draws(config.vocab_size, torch.device("meta"), _listener(listed.setdefault))
    return list(listed)


def weightless_model(
    config: Qwen3Config, tensor_type: GGMLType, on_launch: Callable[[Launch], Any], **options: Any
) -> Qwen3:
    """Create a model of that size on the `meta` device, whose backend reports every launch and launches nothing."""
    backend = CudaBackend("meta", launcher=_listener(on_launch), **options)
    return load_qwen3(cast(WeightSource, _Weightless(config, tensor_type)), backend)


class CountedProducts(TorchDispatchMode):
    """Counts, within its context, what torch itself launches: cuBLAS's products, and picking rows."""

    _NAMES: ClassVar = {"mm": "cuBLAS product", "addmm_": "cuBLAS product", "index_select": "pick logit rows"}

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = self._NAMES.get(func.overloadpacket.__name__)
        if name is not None:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


def compile_for(launch: Launch, capability: int) -> Occupied:
    """Compile for a compute capability (90 for an H200) without such a device. Returns the machine code's resources."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from forge.backends.cuda.launches import COMPILE_OPTIONS

    constants = dict(launch.constants) | {"PDL": capability >= 90}
    signature = dict(launch.signature) | dict.fromkeys(constants, "constexpr")
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = COMPILE_OPTIONS | {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    pointers = [name if kind.startswith("*") else None for name, kind in launch.signature]
    early = read_before_wait(compiled.asm["ptx"], pointers)
    return _occupied(compiled.asm["cubin"], compiled.metadata.shared, early)


def read_before_wait(ptx: str, arguments: Sequence[str | None]) -> tuple[str, ...]:
    """Find in a kernel's PTX the arguments whose memory it reads before `griddepcontrol.wait`. None stands for a
    number.

    Every register is followed back to the parameters that it was computed from. That takes one pass, because nothing
    before a wait is in a loop; a wait after a jump is an error here.
    """
    if "griddepcontrol.wait" not in ptx:
        return ()
    sources: dict[str, frozenset[str]] = {}
    read: set[str] = set()
    for line in re.sub(r"//.*", "", ptx).split("{", 1)[1].split(";"):
        words = re.sub(r"\s+", " ", line).strip()
        if "griddepcontrol.wait" in words:
            break
        assert not re.search(r"\bbra\b", words), f"a jump before the wait: {words}"
        operation = re.search(r"(?:@!?%\w+ )?([a-z][\w.:]*) (.*)", words)
        if operation is None or operation[1].startswith("."):
            continue
        name, operands = operation[1], operation[2]
        from_memory = re.match(r"(ld|cp\.async|atom|red|prefetch)", name) and not name.startswith("ld.param")
        target = operands[: operands.index("}") + 1] if operands.startswith("{") else operands.partition(",")[0]
        inputs = operands[len(target) :] if not name.startswith(("st", "cp.async", "red", "prefetch")) else operands
        parameters = {f"#{index}" for index in re.findall(r"_param_(\d+)", inputs)}
        for register in re.findall(r"%\w+", inputs):
            parameters |= sources.get(register, frozenset())
        if from_memory:
            read |= parameters
        for register in re.findall(r"%\w+", target):
            sources[register] = frozenset(parameters)
    return tuple(sorted(name for index, name in enumerate(arguments) if name is not None and f"#{index}" in read))


def _occupied(cubin: bytes, shared: int, early: tuple[str, ...]) -> Occupied:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def listed(word: str) -> int:
        match = re.search(rf"{word}:(\d+)", listing)
        assert match is not None, listing
        return int(match[1])

    return Occupied(listed("REG"), listed("STACK") + listed("LOCAL"), shared, early)


def _listener(tell: Callable[[Launch], None]) -> Callable[..., None]:
    def listen(kernel, grid, *arguments, num_warps: int, num_stages: int, **constants) -> None:
        assert all(size > 0 for size in grid), (kernel, grid)
        assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:]), (kernel, grid)
        names = kernel.arg_names[: len(arguments)]
        types = tuple((name, _type_of(value)) for name, value in zip(names, arguments, strict=True))
        aligned = tuple(index for index, value in enumerate(arguments) if _is_aligned(value))
        tell(Launch(kernel, types, aligned, tuple(constants.items()), num_warps, num_stages))

    return listen


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, int):
        assert -(2**31) <= value < 2**31
        return "i32"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return isinstance(value, int) and value % 16 == 0


class _Weightless:
    """What `load_qwen3` reads of a `WeightSource`: the right shapes, all zeros that are never read."""

    path = None

    def __init__(self, config: Qwen3Config, tensor_type: GGMLType):
        self.config, self._type, self.nbytes = config, tensor_type, 0

    def tensor(self, name: str) -> "_Zeros":
        shape = expected_tensors(self.config)[name]
        return _Zeros(name, shape, GGMLType.F32 if len(shape) == 1 else self._type)

    def release(self, name: str) -> None:
        pass


@dataclass(frozen=True)
class _Zeros:
    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    nbytes: int = 0

    def raw(self) -> np.ndarray:
        rows = int(np.prod(self.shape[:-1]))
        return np.zeros(rows * row_nbytes(self.ggml_type, self.shape[-1]), np.uint8)

    def dequantize(self) -> np.ndarray:
        return np.zeros(self.shape, np.float32)
