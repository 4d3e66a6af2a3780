"""What forge takes from inside Numba stands in one file, and with the versions that were tried."""

import ast
import tomllib
from pathlib import Path

import pytest
from numba.core.codegen import JITCPUCodegen

import forge
from forge.backends.cpu import numba_internals
from forge.backends.cpu.kernel_table import OperationKernel
from forge.backends.cpu.numba_internals import FIRST_TRIED, LAST_TRIED, UntriedNumba
from forge.backends.cpu.op_layout import QUANTIZE

ROOT = Path(forge.__file__).parent


def names_inside_numba(path: Path) -> set[str]:
    """What a file imports from `numba.core`, and what with an underscore from any module of Numba's."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "numba":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("numba.") and ("numba.core" in name or "._" in name)}


def test_no_other_file_reaches_inside_numba():
    reaching = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if names_inside_numba(path)}
    assert reaching == {"backends/cpu/numba_internals.py"}


def test_the_installed_versions_are_bounded_by_those_that_were_tried():
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    major, minor = LAST_TRIED.split(".")
    assert f"numba>={FIRST_TRIED},<{major}.{int(minor) + 1}" in declared
    assert f"Numba     {FIRST_TRIED} to {LAST_TRIED} " in numba_internals.__doc__


def test_a_numba_that_lacks_a_name_is_refused_in_one_line(monkeypatch):
    monkeypatch.delattr(JITCPUCodegen, "set_env", raising=True)
    with pytest.raises(UntriedNumba, match=r"^Numba \S+ cannot compile the kernels .*set_env.* tried with .*doctor"):
        OperationKernel("kernels", "quantize", QUANTIZE)._module()
