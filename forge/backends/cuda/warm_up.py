"""Kernels compiled before the first step needs them, by as many processes as there are cores.

Triton compiles a kernel when it is first launched, a second at a time, and keeps the result on disk. A model launches a
hundred specializations, so the first minutes of a server would be compiling. Here every launch is described first, and
then compiled by processes that touch no device: each takes its share, runs Triton's own path up to the launch, and
leaves the result in Triton's cache on disk, where the first real launch finds it.

The workers run `python -m forge.backends.cuda.warm_up`: JSON on standard input, a line per kernel on standard output.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any, NamedTuple

Progress = Callable[[int, int], None]
"""Called with (kernels compiled, kernels in all)."""

_WORKER = "forge.backends.cuda.warm_up"
_KERNELS = "forge.backends.cuda.kernels."
LEAST_PER_WORKER = 4
"""Kernels for which a process is worth starting: it takes as long as about two."""


class LaunchDescription(NamedTuple):
    """Everything that determines the compiled code of a launch, and nothing else."""

    kernel: str
    """`module.function`, below `forge.backends.cuda.kernels`."""
    arguments: tuple[tuple[str, int | float], ...]
    """For a tensor, its dtype and its address modulo 16; for a number, its type and a number that Triton treats
    alike."""
    options: tuple[tuple[str, Any], ...]
    """Constants, warps, stages, and how it is launched."""


def describe(kernel, arguments: Sequence[Any], options: dict[str, Any]) -> LaunchDescription:
    """Return the description of a launch with these arguments."""
    name = f"{kernel.fn.__module__.removeprefix(_KERNELS)}.{kernel.fn.__name__}"
    return LaunchDescription(name, tuple(map(_described, arguments)), tuple(sorted(options.items())))


def _described(value: Any) -> tuple[str, int | float]:
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):  # Triton tells 1, multiples of 16 and other numbers apart, and those of 64 bits
        in_64_bits = 0 if -(2**31) <= value < 2**31 else 1 << 40
        return "int", value if value == 1 else in_64_bits + (16 if value % 16 == 0 else 3)
    if isinstance(value, float):
        return "float", 0.5
    address = value.data_ptr() or value.storage_offset() * value.element_size()  # 0 where there is no memory
    return str(value.dtype).removeprefix("torch."), address % 16


class _Tensor:
    """A tensor as Triton sees it before a launch."""

    def __init__(self, dtype, address: int):
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        return 0


def compile_missing(launches: Iterable[LaunchDescription], on_progress: Progress = lambda done, of: None) -> list[str]:
    """Call `compile_all`, unless this machine has compiled the same launches of the same kernels before."""
    import triton
    from triton import knobs

    distinct = list(dict.fromkeys(launches))
    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    made_of = [triton.__version__.encode(), json.dumps(distinct).encode(), *(source.read_bytes() for source in sources)]
    mark = Path(knobs.cache.dir) / f"forge-compiled-{sha256(b'|'.join(made_of)).hexdigest()[:32]}"
    if mark.exists():
        return []
    failed = compile_all(distinct, on_progress)
    if not failed:
        with suppress(OSError):  # a cache that cannot be written: then the next process compiles again
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return failed


def compile_all(launches: Iterable[LaunchDescription], on_progress: Progress = lambda done, of: None) -> list[str]:
    """Compile in parallel what is not in Triton's cache. Returns a line for each kernel that failed."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    distinct = list(dict.fromkeys(launches))
    workers = max(1, min(len(os.sched_getaffinity(0)), len(distinct) // LEAST_PER_WORKER))
    shares = [distinct[index::workers] for index in range(workers)]
    processes = [_start([target.backend, target.arch, target.warp_size], share) for share in shares if share]
    failed, done = [], 0
    on_progress(done, len(distinct))
    try:
        with DefaultSelector() as selector:
            for process in processes:
                selector.register(_pipe(process.stdout), EVENT_READ, process.stdout)
            while selector.get_map():
                for key, _ in selector.select():
                    line = key.data.readline()
                    if not line:
                        selector.unregister(key.fileobj)
                        continue
                    done += 1
                    failed += [problem] if (problem := json.loads(line)) else []
                    on_progress(done, len(distinct))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            _pipe(process.stdout).close()
    return failed + ["a compiling process ended early"] * (done < len(distinct))


def _start(target: list, launches: Sequence[LaunchDescription]) -> subprocess.Popen:
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        bufsize=0,  # so that `select` sees every line
    )
    with _pipe(process.stdin) as work:
        work.write(json.dumps({"target": target, "launches": launches}).encode())
    return process


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was asked for"
    return stream


class _NoDevice:
    """A Triton driver for compiling: it names the target and has nothing to launch on."""

    def __init__(self, target):
        self._target = target

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(launch: LaunchDescription) -> Any:
    """Compile through Triton's own path, up to the launch. Returns the compiled kernel."""
    import torch

    module, _, name = launch.kernel.rpartition(".")
    kernel = getattr(import_module(_KERNELS + module), name)
    arguments = [
        value if kind in ("int", "float", "bool") else _Tensor(getattr(torch, kind), int(value))
        for kind, value in launch.arguments
    ]
    return kernel.warmup(*arguments, grid=(1,), **dict(launch.options))


def main() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    work = json.loads(sys.stdin.read())
    driver.set_active(_NoDevice(GPUTarget(*work["target"])))
    for kernel, arguments, options in work["launches"]:
        problem = None
        try:
            compile_one(LaunchDescription(kernel, arguments, options))
        except Exception as error:  # the others are still worth compiling
            problem = f"{kernel}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        sys.stdout.write(json.dumps(problem) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
