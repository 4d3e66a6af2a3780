"""A worker that does nothing of use, for tests of the conversation."""

import sys
import time

from forge.bench.worker import Missing, serve


def echo(**fields):
    print("a library that talks on standard output")
    return fields


def fail():
    raise ValueError("two\nlines")


def absent():
    raise Missing("no such library")


def die():
    print("Traceback …\nfatal: out of luck", file=sys.stderr)
    sys.stderr.flush()
    import os

    os._exit(3)


serve({"echo": echo, "fail": fail, "absent": absent, "die": die, "sleep": lambda: time.sleep(600) or {}})
