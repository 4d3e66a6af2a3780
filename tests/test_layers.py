"""Imports point downwards: a folder of forge/ imports from those below it, wherever in a file the import stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge

ROOT = Path(forge.__file__).parent
ORDER = (
    ("experiments", "bench", "cli"),  # `forge --help` names them, and they take the command line's options
    ("exercises",),
    ("book",),
    ("cluster",),
    ("server",),
    ("views",),
    ("testing",),
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
        if LEVELS.get(target, LEVELS[folder]) < LEVELS[folder]
    }
    assert not upward


def test_every_folder_has_its_place():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(LEVELS)


def test_who_knows_an_experiment_by_name():
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "experiments" and "experiments" in imported_folders(path)
    }
    assert knowing == {"cli/main.py", "bench/engine.py"}


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
