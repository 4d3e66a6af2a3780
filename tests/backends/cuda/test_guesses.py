"""The page on the GPU lists every constant that is a guess, with its value."""

import ast
import re
from itertools import pairwise

from tests.cli.conftest import ROOT


def test_the_table_of_guesses_is_the_codes():
    in_code = {}
    for path in (ROOT / "forge/backends/devices.py", *(ROOT / "forge/backends/cuda").glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in pairwise(body):
            is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.Assign) and is_docstring and "Guess" in str(after.value.value):
                in_code[f"{path.stem}.{ast.unparse(node.targets[0])}"] = ast.unparse(node.value)

    page = (ROOT / "chapters/reference/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `(.+?)` \| (.+) \|$", page, re.MULTILINE)

    assert len(in_code) > 10
    assert {name: value for name, value, _ in rows} == in_code
    assert all(len(settles) > 10 for *_, settles in rows)
