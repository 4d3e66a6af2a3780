"""A GPU machine on which nothing can be installed: Python, NumPy, torch, Triton and what those require."""

import re
from importlib import metadata
from pathlib import Path

from tests.backends.cpu.models import ROOT

INSTALLED = ("numpy", "torch", "triton")


def refused_packages(*also: str) -> set[str]:
    """The names by which everything else that is installed here is imported. also: packages that it has too."""
    allowed: set[str] = set()
    waiting = [*INSTALLED, *also]
    while waiting:
        name = _normal(waiting.pop())
        if name in allowed:
            continue
        allowed.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", one)[0] for one in required if "extra ==" not in one]
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if module != "forge" and not allowed & {_normal(each) for each in distributions}
    }


def bare_environment(refused_imports: Path | None = None, also: tuple[str, ...] = ()) -> dict[str, str]:
    """Variables that make a Python process such a machine. refused_imports: a file for the imports that failed.

    also: packages that it has too."""
    paths = f"{ROOT / 'tests/backends/cuda/bare'}:{ROOT}"
    found = {
        "PYTHONPATH": paths,
        "REFUSED_PACKAGES": ",".join(sorted(refused_packages(*also))),
        "TRITON_INTERPRET": "1",
    }
    return found | ({"REFUSED_IMPORTS": str(refused_imports)} if refused_imports is not None else {})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
