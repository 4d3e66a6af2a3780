"""A worker that does nothing of use, for tests of the conversation."""

import os
import subprocess
import sys
import time

from forge.bench.worker import Missing, Worker, serve_requests


class Stub(Worker):
    def echo(self, **fields):
        print("a library that talks on standard output")
        return fields

    def fail(self):
        raise ValueError("two\nlines")

    def absent(self):
        raise Missing("no such library")

    def die(self):
        print("Traceback …\nfatal: out of luck", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)

    def start(self):
        return {"pid": subprocess.Popen(["sleep", "600"]).pid}

    def sleep(self):
        time.sleep(600)


serve_requests(Stub())
