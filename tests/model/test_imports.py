"""The model defines the interface of a backend; backends import the model, never the reverse."""

import ast
from pathlib import Path

import pytest

import forge

PACKAGE = Path(forge.__file__).parent
FILES = sorted(path for folder in ("model", "gguf", "tokenizer") for path in (PACKAGE / folder).glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_and_models_import_neither_backends_nor_the_engine(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not [name for name in names if name.startswith(("forge.backends", "forge.engine"))], node.lineno
