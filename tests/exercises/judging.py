"""Many solutions at once: each is checked in one of a few processes, within the limits that a reader's check has."""

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from forge.exercises import find_entry
from forge.exercises.session import Result

_PROCESSES = 2
_CALL_SECONDS = 0.5
Judged = Result | str
"""What the check said; text, where it failed itself."""


def judge(name: str, source: str) -> Judged:
    """What the check says of this source, in this process."""
    from forge.exercises.child import check_here

    entry = find_entry(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, entry.file_name)
        path.write_text(source, encoding="utf-8")
        try:
            return check_here(entry, path)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            sys.path[:] = [item for item in sys.path if item != folder]


@contextmanager
def judges() -> Iterator[ProcessPoolExecutor]:
    """Processes in which solutions are checked."""
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn"), _prepare) as pool:
        yield pool


def judge_all(pool: ProcessPoolExecutor, solutions: Iterable[tuple[str, str]]) -> list[Judged]:
    return list(pool.map(judge, *zip(*solutions, strict=True), chunksize=4))


def _prepare() -> None:
    from forge.exercises import loading

    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    loading.CALL_SECONDS = _CALL_SECONDS
    loading.limit_process()
