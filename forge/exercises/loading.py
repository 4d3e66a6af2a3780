"""A reader's file as a module, and the line of it at which an exception was raised."""

import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(path: str | Path) -> ModuleType:
    """The file as a module. Raises what the file raises."""
    path = Path(path).resolve()
    spec = spec_from_file_location(f"exercise_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def line_in(path: str, error: BaseException) -> str | None:
    """`file.py:12: the line`, the last line of this file that the exception passed through; None if it was in none."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{Path(path).name}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if not frames:
        return None
    return f"{Path(path).name}:{frames[-1].lineno}: {frames[-1].line}"
