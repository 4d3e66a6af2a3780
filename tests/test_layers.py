"""Imports point downwards: a folder of forge/ imports from those below it, wherever in a file the import stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge

ROOT = Path(forge.__file__).parent
ORDER = (
    ("experiments", "cli"),  # `forge --help` names the experiments, and they take the command line's options
    ("exercises",),
    ("book",),
    ("cluster",),
    ("server",),
    ("views",),
    ("testing",),
    ("bench",),
    ("workload",),
    ("speculation",),
    ("grammar",),
    ("engine",),
    ("backends",),
    ("model",),
    ("cache",),
    ("gguf",),
    ("tokenizer",),
    ("trace",),
)
"""From the top down."""
LEVELS = {folder: level for level, folders in enumerate(ORDER) for folder in folders}


def imported_folders(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "forge":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("folder", LEVELS)
def test_a_folder_imports_only_from_those_below_it(folder):
    upward = {
        f"{path.relative_to(ROOT)} imports {target}"
        for path in (ROOT / folder).rglob("*.py")
        for target in imported_folders(path)
        if LEVELS.get(target, LEVELS[folder]) < LEVELS[folder] and path.name != "gpu_stages.py"  # it runs `forge bench`
    }
    assert not upward


def test_every_folder_has_its_place():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(LEVELS)


def test_only_the_command_line_and_the_gpu_session_know_the_experiments():
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "experiments" and "experiments" in imported_folders(path)
    }
    assert knowing == {"cli/main.py", "cli/bench.py", "bench/gpu_stages.py"}


def test_no_imports_go_round_in_a_circle():
    """Wherever in a file the import stands, for types alone too."""
    modules = {".".join(("forge", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    imports = {name: set(imported_modules(path, modules)) - {name} for name, path in modules.items()}
    with pytest.raises(AssertionError, match="in a circle"):
        check_no_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    check_no_circle(imports)


def imported_modules(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from ({name, node.module} & modules.keys()) if name not in modules else {name}


def check_no_circle(imports: dict[str, set[str]]) -> None:
    """Take away what imports nothing that is left, again and again: a circle stays."""
    left = dict(imports)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"imports go round in a circle among {sorted(left)}"
