"""Makes this Python and all that it starts one in which the packages of REFUSED_PACKAGES are not installed.

Python imports it at its start where this folder is in PYTHONPATH (`bare_machine.py`). What forge itself looked
for in vain is listed in the file REFUSED_IMPORTS.
"""

import os
import sys
from importlib.machinery import PathFinder

REFUSED = frozenset(os.environ.get("REFUSED_PACKAGES", "").split(","))
FORGE = f"{os.sep}forge{os.sep}"


class BarePathFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in REFUSED:
            return super().find_spec(name, path, target)
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and FORGE in frame.f_code.co_filename and "REFUSED_IMPORTS" in os.environ:
            with open(os.environ["REFUSED_IMPORTS"], "a") as refused:
                refused.write(f"{name} {frame.f_code.co_filename}:{frame.f_lineno}\n")
        return None


sys.meta_path[:] = [BarePathFinder if finder is PathFinder else finder for finder in sys.meta_path]
