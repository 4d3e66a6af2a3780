"""`python -m forge.backends.cpu.ahead FOLDER` compiles every kernel for common processors; `make wheel` ships the code.

One folder for each instruction set that this machine can run, for the least processor that has it. Where one of them
fits (`compilation.shipped_folder`), a first command loads it and neither Numba nor LLVM's optimizer runs.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forge.backends.cpu import compilation
from forge.backends.cpu.processor import FORCE_VARIABLE, INSTRUCTION_SETS, runnable

SETS = tuple(name for name, kind in INSTRUCTION_SETS.items() if kind.target_needs)
"""The instruction sets that code is shipped for."""
_COMPILE = """
from forge.backends.cpu.compilation import compile_all
from forge.backends.cpu.kernel_table import all_items
compile_all(all_items())
"""


def compile_for(name: str, folder: Path) -> Path:
    """Compile all kernels for an instruction set, in a process that it is forced on, and return their folder, which is
    made in `folder`. Raises `CalledProcessError` if that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", _COMPILE]
        subprocess.run(command, env=os.environ | {FORCE_VARIABLE: name, "XDG_CACHE_HOME": scratch}, check=True)
        [compiled] = Path(scratch, "forge").iterdir()
        return shutil.copytree(compiled, folder / compilation.shipped_name(INSTRUCTION_SETS[name]()))


def main(folder: Path) -> None:
    """Make `folder` anew. An instruction set that this machine cannot run is left out, since it cannot be tried."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in SETS:
        if name in runnable():
            print(compile_for(name, folder))
        else:
            print(f"{name}: left out, as this processor has not got it", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
