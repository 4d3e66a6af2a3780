"""What a model would launch, compiled for a GPU that is not there, and what each kernel takes of a multiprocessor."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from forge.backends.cuda import warm_up
from forge.backends.cuda.ahead_of_time import weightless_model
from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.launches import ListingLauncher
from forge.backends.cuda.sampling import list_draws
from forge.backends.cuda.warm_up import LaunchDescription
from forge.gguf import GGMLType
from forge.model.config import Qwen3Config
from forge.model.forward_batch import ForwardBatch


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


class Checked(ListingLauncher):
    """Lists launches whose grids CUDA takes, and whose numbers fit the kernels' 32 bits."""

    def __call__(self, kernel, grid, *arguments, **options) -> None:
        assert all(size > 0 for size in grid), (kernel, grid)
        assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:]), (kernel, grid)
        assert all(-(2**31) <= value < 2**31 for value in arguments if isinstance(value, int)), (kernel, arguments)
        super().__call__(kernel, grid, *arguments, **options)


def launched_by(
    config: Qwen3Config,
    tensor_type: GGMLType,
    batches: Sequence[ForwardBatch],
    capability: int = 90,
    block_size: int = 16,
    **options: Any,
) -> list[LaunchDescription]:
    """List every launch of a model of that size over `batches`, each specialization once, in order of first use.

    options: of `CudaBackend`.
    """
    listing = Checked(dependent=capability >= 90)
    model = weightless_model(config, tensor_type, listing, **options)
    assert isinstance(model.backend, CudaBackend)
    layout = model.kv_layout(1024, block_size, model.backend.default_kv_dtype)
    storage = model.backend.new_storage(layout)
    for batch in batches:
        model.backend.launch(model.forward_pass, batch, storage)
    list_draws(config.vocab_size, torch.device("meta"), listing)
    return list(listing.found)


def constants_of(launch: LaunchDescription) -> dict[str, Any]:
    """The constants that distinguish a specialization, as kernels write them."""
    return {name: value for name, value in launch.options if name.isupper() and name != "PDL"}


def name_of(launch: LaunchDescription) -> str:
    """The kernel, with what distinguishes this specialization."""
    short = {name: value for name, value in constants_of(launch).items() if value is not False}
    return f"{launch.kernel.rpartition('.')[2]}({', '.join(f'{name}={value}' for name, value in short.items())})"


def compile_for(launch: LaunchDescription, capability: int) -> Occupied:
    """Compile for a compute capability (90 for an H200) without such a device. Returns the machine code's resources."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(warm_up._NoDevice(GPUTarget("cuda", capability, 32)))
    compiled = warm_up.compile_one(launch)
    module, _, name = launch.kernel.rpartition(".")
    names = getattr(import_module(warm_up._KERNELS + module), name).arg_names
    of_kernel = [pair for pair in zip(names, launch.arguments, strict=False) if pair[1] != ("int", 1)]  # a constant
    pointers = [name if kind not in ("int", "float", "bool") else None for name, (kind, _) in of_kernel]
    early = read_before_wait(compiled.asm["ptx"], pointers)
    return _occupied(compiled.asm["cubin"], compiled.metadata.shared, early)


def read_before_wait(ptx: str, arguments: Sequence[str | None]) -> tuple[str, ...]:
    """Find in a kernel's PTX the arguments whose memory it reads before `griddepcontrol.wait`. None stands for a
    number.

    Every register is followed back to the parameters that it was computed from. That takes one pass, because nothing
    before a wait is in a loop; a wait after a jump is an error here, and so is one after the next kernel's start.
    """
    if "griddepcontrol.wait" not in ptx:
        return ()
    sources: dict[str, frozenset[str]] = {}
    read: set[str] = set()
    for line in re.sub(r"//.*", "", ptx).split("{", 1)[1].split(";"):
        words = re.sub(r"\s+", " ", line).strip()
        if "griddepcontrol.wait" in words:
            break
        assert "griddepcontrol.launch_dependents" not in words, "the next kernel would wait beside this one"
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
