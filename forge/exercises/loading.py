"""A reader's file as a module, what of it is written, and the line of it at which an exception was raised."""

import ast
import sys
import traceback
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(path: str | Path) -> ModuleType:
    """Import the file as a module that may import the files beside it. Raises what the file raises."""
    path = Path(path).resolve()
    spec = spec_from_file_location(f"exercise_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def unwritten(path: str | Path, functions: Sequence[str]) -> tuple[str, ...]:
    """List the functions whose body is still the template's `raise NotImplementedError`."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    bodies: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            bodies[node.name] = node.body
        elif isinstance(node, ast.ClassDef):
            bodies |= {f"{node.name}.{item.name}": item.body for item in node.body if isinstance(item, ast.FunctionDef)}
    return tuple(name for name in functions if name in bodies and _is_stub(bodies[name]))


def _is_stub(body: list[ast.stmt]) -> bool:
    *_, last = body
    if not isinstance(last, ast.Raise) or not all(
        isinstance(statement, ast.Expr | ast.Pass) for statement in body[:-1]
    ):
        return False
    raised = last.exc.func if isinstance(last.exc, ast.Call) else last.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def is_missing(piece: ModuleType, function: str) -> bool:
    """True if the file does not define this function itself, but lacks it, inherits it or imports it from forge."""
    name, _, method = function.partition(".")
    holder = getattr(piece, name, None)
    if not method or holder is None:
        return holder is None or _is_of_forge(holder)
    owner = next((kind for kind in getattr(holder, "__mro__", ()) if method in vars(kind)), None)
    return owner is None or _is_of_forge(owner) or _is_of_forge(vars(owner)[method])


def _is_of_forge(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("forge.")


def line_in(path: str, error: BaseException) -> str | None:
    """Return `file.py:12: the line` for the last line of this file in the traceback; None if none is in it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{Path(path).name}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if not frames:
        return None
    return line_at(path, frames[-1].lineno or 0)


def line_at(path: str, number: int) -> str:
    """Return `file.py:12: the line`."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"{Path(path).name}:{number}: {text}"
