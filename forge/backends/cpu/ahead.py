"""`python -m forge.backends.cpu.ahead FOLDER` compiles every kernel for common processors; `make wheel` ships the code.

It makes one folder for each instruction set that this machine can run, for the least processor that has the set. Where
one of them fits (`compilation.shipped_folder`), a first command loads its code, and neither Numba nor LLVM.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forge.backends.cpu import compilation
from forge.backends.cpu.kernel_table import all_items
from forge.backends.cpu.processor import FORCE_VARIABLE, INSTRUCTION_SETS, runnable
from forge.errors import ForgeError

SETS = tuple(name for name, kind in INSTRUCTION_SETS.items() if kind.target_needs)
"""The instruction sets that code is shipped for."""
_COMPILE = """
from forge.backends.cpu.compilation import compile_all
from forge.backends.cpu.kernel_table import all_items
compile_all(all_items())
"""


def compile_for(name: str, folder: Path) -> Path:
    """Compile all kernels for an instruction set, in a process that it is forced on, and return their folder, which is
    made in `folder`. Raises `ForgeError` if a kernel is missing, because it was not compiled or could not be kept."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", _COMPILE]
        subprocess.run(command, env=os.environ | {FORCE_VARIABLE: name, "XDG_CACHE_HOME": scratch}, check=False)
        compiled = {path.name: path for path in Path(scratch).glob("forge/kernels-*/*.o")}
        kernels = {f"{item.name}.o" for item in all_items()}
        if missing := kernels - compiled.keys():
            raise ForgeError(f"{name}: {len(missing)} of {len(kernels)} kernels are missing, {min(missing)} among them")
        target = folder / compilation.shipped_name(INSTRUCTION_SETS[name]())
        target.mkdir(parents=True)
        for path in compiled.values():
            shutil.copy(path, target)
        return target


def main(arguments: Sequence[str]) -> int:
    """Compile for every set that this machine can run; another is left out, since it could not be tried. A folder that
    has something in it is refused."""
    if len(arguments) != 1:
        print("usage: python -m forge.backends.cpu.ahead FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        print(f"{folder} is not an empty folder: remove it, or name another", file=sys.stderr)
        return 2
    try:
        for name in SETS:
            if name in runnable():
                print(compile_for(name, folder))
            else:
                print(f"{name}: left out, this processor cannot run it", file=sys.stderr)
    except (ForgeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
