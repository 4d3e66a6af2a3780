"""Stages that do what real ones may do on a bad day. The session starts each in a process of its own."""

import os
import signal
import subprocess
import sys
import time

from forge.bench.gpu_session import Skip


def works(report):
    print("said by a stage")
    report("first", 1.5)
    report("second", {"ms": [1, 2]})


def fails(report):
    report("before", 1)
    raise RuntimeError("CUDA error: an illegal memory access")


def hangs(report):
    report("before", 1)
    time.sleep(600)


def hangs_deaf(report):
    """To every signal that a process can ignore, with a child of its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report("own process", started.pid)
    time.sleep(600)


def is_killed(report):
    report("before", 1)
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed_at_random(report):
    """In the middle of a line, too."""
    import random

    for number in range(random.randrange(1, 40)):
        report(f"figure {number}", number)
    os.write(int(sys.argv[sys.argv.index("--pipe") + 1]), b'{"figure": "half')
    os.kill(os.getpid(), signal.SIGKILL)


def counts_until_killed(report):
    report("own process", os.getpid())
    number = 0
    while True:
        report(f"figure {number}", number)
        number += 1
        time.sleep(0.002)


def skips(report):
    raise Skip("needs fastapi")


def fails_in_part(report):
    with report.part("broken"):
        raise ValueError("no such tile")
    report("whole", 2)


def talks_much(report):
    for _ in range(60_000):
        print("x" * 60)
    print("the end")
    report("done", True)


def leaves_a_process_behind(report):
    """Which holds the pipe open."""
    pipe = int(sys.argv[sys.argv.index("--pipe") + 1])
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=(pipe,))
    report("own process", started.pid)
