"""What Prometheus reads of HTTP and of the processes, beside the engine's figures: statuses, durations, memory, files.

The names are those of the field's instrumentation: `http_requests_total` and `http_request_duration_seconds` as
prometheus-fastapi-instrumentator has them, which vLLM uses (here with the status itself, so that 429 is told from other
4xx), and `process_*` as prometheus_client has them, with a label for the process.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from forge.server.exchange import Exchange
from forge.server.metrics import Family, Histogram

_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Counts the requests that have ended."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._num_refused = 0

    def take(self, exchange: Exchange) -> None:
        method = exchange.method if exchange.method in _METHODS else "other"
        labels = f'handler="{exchange.route}",method="{method}"'
        self._requests[f'{labels},status="{exchange.status}"'] += 1
        self._durations.setdefault(labels, Histogram(_DURATIONS)).observe(exchange.seconds)

    def take_refused_connection(self) -> None:
        self._num_refused += 1

    def families(self, num_open: int) -> Iterator[Family]:
        """Return the metrics. num_open: requests that are being answered."""
        yield _family("http_requests_total", "counter", "Requests that have ended, by status.", self._requests)
        yield _family("http_requests_in_progress", "gauge", "Requests that are being answered.", {"": num_open})
        refused = {"": self._num_refused}
        yield _family("http_connections_refused_total", "counter", "Answered with 503, as all are in use.", refused)
        lines = [line for labels, histogram in self._durations.items() for line in histogram.lines(_DURATION, labels)]
        yield _header(_DURATION, "histogram", "From a request's head to the end of its answer."), lines


_DURATION = "http_request_duration_seconds"


def process_families(processes: Mapping[str, int]) -> Iterator[Family]:
    """Return the metrics of processes, by a name and their id. Empty if the system does not tell them (`/proc`)."""
    values: dict[str, dict[str, float]] = {name: {} for name in _PROCESS}
    for name, pid in processes.items():
        with suppress(OSError, ValueError, IndexError):
            for metric, value in _read_process(Path("/proc") / str(pid)).items():
                values[metric][f'process="{name}"'] = value
    for name, (kind, text) in _PROCESS.items():
        if values[name]:
            yield _family(name, kind, text, values[name])


_PROCESS = {
    "process_cpu_seconds_total": ("counter", "User and system time."),
    "process_resident_memory_bytes": ("gauge", "Memory that is in RAM."),
    "process_virtual_memory_bytes": ("gauge", "Memory that is reserved."),
    "process_start_time_seconds": ("gauge", "When the process began, in Unix time."),
    "process_open_fds": ("gauge", "Open files and connections."),
    "process_max_fds": ("gauge", "The most that may be open."),
}


def _read_process(folder: Path) -> dict[str, float]:
    """Read a process's figures as prometheus_client does: proc(5)."""
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    limits = (folder / "limits").read_text().splitlines()
    return {
        "process_cpu_seconds_total": (int(stat[11]) + int(stat[12])) / ticks,
        "process_virtual_memory_bytes": int(stat[20]),
        "process_resident_memory_bytes": int(stat[21]) * page,
        "process_start_time_seconds": round(time.time() - up + int(stat[19]) / ticks, 2),
        "process_open_fds": len(list((folder / "fd").iterdir())),
        "process_max_fds": float(next(line for line in limits if line.startswith("Max open files")).split()[3]),
    }


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> Family:
    lines = [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items()]
    return _header(name, kind, text), lines


def _header(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"
