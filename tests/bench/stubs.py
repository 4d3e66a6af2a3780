"""Bench processes for tests: a real process that echoes, and scripted ones without a process."""

import sys
from dataclasses import dataclass
from pathlib import Path

from forge.bench.process import Launch, PeerMissing, ProcessFailed


@dataclass(frozen=True)
class StubLaunch(Launch):
    """Starts `stub_worker.py`."""

    name: str = "stub"
    module: str = "stub_worker"

    def command(self):
        return [sys.executable, str(Path(__file__).with_name("stub_worker.py"))]


class Script:
    """Stands in for `BenchProcess`: answers from `seconds[name]`, and writes down in `log` who was asked what."""

    def __init__(self, seconds, missing=(), failing=()):
        self.seconds = {name: list(times) for name, times in seconds.items()}
        self.missing, self.failing = missing, failing
        self.log, self.open = [], 0

    def __call__(self, launch):
        self.open += 1
        return _Scripted(self, launch.name)


class _Scripted:
    def __init__(self, script, name):
        self.script, self.name, self.is_open = script, name, True

    def ask(self, do, **fields):
        self.script.log.append((self.name, do))
        if do == "measure_cpu":
            return {"threads": 1, "bytes_per_second": 1e9, "products_per_second": 1e9}
        if do == "load":
            if self.name in self.script.missing:
                raise PeerMissing(f"{self.name} is not importable")
            return {"description": f"{self.name} 1.0", "seconds": 0.5, "first_time": False, "weight_bytes": 10}
        if do == "prepare":
            return {"setting": "its best", "seconds": 0.1}
        if do == "logits":
            return {"logits": [1.0, 0.0 if self.name == "float32" else 0.5]}
        if do == "memory":
            return {"peak_bytes": 1000}
        if self.name in self.script.failing:
            raise ProcessFailed(f"{self.name}: broke")
        return {"seconds": [self.script.seconds[self.name].pop(0)], "top_tokens": [1]}

    def close(self):
        self.script.open -= self.is_open
        self.is_open = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
