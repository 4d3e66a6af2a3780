"""Counters, gauges and histograms in Prometheus' text format: of the engine's work, of HTTP and of the processes.

The engine's have vLLM's names: dashboards made for it read them. The histograms have vLLM's bounds, and below its least
some finer ones: a small model's times would all lie there. HTTP's have the names of prometheus-fastapi-instrumentator,
which vLLM uses (here with the status itself, so that 429 is told from other 4xx), and the processes' those of
prometheus_client, with a label for the process.

Without prometheus_client: its histograms take values one by one, which is 106 µs for a step of 64 decoding sequences
where `Histogram` takes 1 µs; importing it takes 20 ms, and it saves the twenty lines that write the text.
"""

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.messages import Gauges, Ready, StepSummary
from forge.trace.speculation_summary import DraftTotals

_TTFT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LONG = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_SAMPLES = (1, 2, 5, 10, 20)
_UP_TO_THE_MODELS = ()
"""1, 2, 5, 10, … up to the model's length."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = {
    "num_preemptions": "Sequences that had to give their blocks up.",
    "prompt_tokens": "Prompt tokens of requests that have ended.",
    "prompt_tokens_cached": "Of those, the ones found in the cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
}
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Between one token and the next.", _ITL),
    "request_time_per_output_token_seconds": ("The mean of a choice's.", _ITL),
    "time_per_output_token_seconds": ("The same under its older name.", _ITL),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _LONG),
    "request_queue_time_seconds": ("From arrival to admission.", _LONG),
    "request_inference_time_seconds": ("From admission to the last token.", _LONG),
    "request_prefill_time_seconds": ("From admission to the first token.", _LONG),
    "request_decode_time_seconds": ("From the first token to the last.", _LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", _UP_TO_THE_MODELS),
    "request_generation_tokens": ("Tokens of a choice.", _UP_TO_THE_MODELS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", _UP_TO_THE_MODELS),
    "request_params_max_tokens": ("Tokens that a request may have.", _UP_TO_THE_MODELS),
    "request_params_n": ("Choices that a request asks for.", _SAMPLES),
    "iteration_tokens_total": ("Prompt tokens computed and tokens generated in a step.", _STEP_TOKENS),
}
_OF_DRAFTS = {
    "num_drafts_total": ("Cycles: a draft proposed for a sequence.", "cycles"),
    "num_draft_tokens_total": ("Draft tokens.", "proposed"),
    "num_accepted_tokens_total": ("Draft tokens accepted.", "accepted"),
    "num_won_total": ("Cycles whose tokens were emitted, of several drafts.", "won"),
    "draft_acceptance_rate": ("Accepted over proposed.", "acceptance"),
}
"""vLLM's counters with a label for the draft, and the field of `DraftTotals`; a rate is one counter over another."""

_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_DURATION = "http_request_duration_seconds"
_PROCESS = {
    "process_cpu_seconds_total": ("counter", "User and system time."),
    "process_resident_memory_bytes": ("gauge", "Memory that is in RAM."),
    "process_virtual_memory_bytes": ("gauge", "Memory that is reserved."),
    "process_start_time_seconds": ("gauge", "When the process began, in Unix time."),
    "process_open_fds": ("gauge", "Open files and connections."),
    "process_max_fds": ("gauge", "The most that may be open."),
}
Family = tuple[str, list[str]]
"""The two lines that describe a name, and the lines with its values."""


class Histogram:
    """Counts observations by upper bound."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float | None, times: int = 1) -> None:
        """Count `value` `times` times, unless it is None."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += times
            self.sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum}", f"{name}_count{{{labels}}} {total}"]


class Metrics:
    """Counts what the engine reports, and writes it as Prometheus text."""

    def __init__(self, ready: Ready, replica: str | None = None):
        """replica: which of several engines this is; None for the only one."""
        self._which = which = 'engine="0"' + ("" if replica is None else f',replica="{_escaped(replica)}"')
        self._cache = f'block_size="{ready.block_size}",num_gpu_blocks="{ready.num_blocks}",{which}'
        self.gauges = Gauges()
        """The engine's present state."""
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.drafts: dict[str, DraftTotals] = {}
        tokens = _bounds_of_tokens(ready.max_model_len)
        self.histograms = {name: Histogram(bounds or tokens) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._last_step_ended = 0.0

    def take_step(self, step: StepSummary) -> None:
        self.counts["generation_tokens"] += step.num_generated
        self.counts["num_preemptions"] += step.num_preempted
        self._observe(iteration_tokens_total=step.num_prefilled + step.num_generated)
        if step.num_decoding:  # each of them had its last token in the step before
            since = step.ended - self._last_step_ended if self._last_step_ended else step.milliseconds / 1e3
            self.histograms["inter_token_latency_seconds"].observe(since, step.num_decoding)
        self._last_step_ended = step.ended
        for name, proposed, accepted, won in step.cycles:
            self.drafts.setdefault(name, DraftTotals(name)).add(proposed, accepted, won)

    def take_output(self, output: RequestOutput, params: SamplingParams, arrived: float) -> None:
        """Count a request that has ended and that came in at `arrived`, in seconds on the monotonic clock."""
        self._observe(
            request_params_max_tokens=params.max_tokens,
            request_params_n=params.n,
            request_max_num_generation_tokens=max(len(sample.token_ids) for sample in output.outputs),
        )
        self._take_prompt(len(output.prompt_token_ids))
        self.counts["prompt_tokens_cached"] += output.metrics.tokens_cached
        for sample in output.outputs:
            metrics = sample.metrics
            if sample.finish_reason is not None:
                self.finished[sample.finish_reason] += 1
            self._observe(request_generation_tokens=len(sample.token_ids))
            if metrics.first_token is None or metrics.last_token is None or metrics.admitted is None:
                continue
            per_token = metrics.time_per_output_token_ms
            mean = None if per_token is None else per_token / 1e3
            self._observe(
                time_to_first_token_seconds=metrics.first_token - arrived,
                e2e_request_latency_seconds=metrics.last_token - arrived,
                request_queue_time_seconds=metrics.admitted - arrived,
                request_inference_time_seconds=metrics.last_token - metrics.admitted,
                request_prefill_time_seconds=metrics.first_token - metrics.admitted,
                request_decode_time_seconds=metrics.last_token - metrics.first_token,
                request_time_per_output_token_seconds=mean,
                time_per_output_token_seconds=mean,
            )

    def take_answers(self, lengths: Sequence[int], seconds: float) -> None:
        """Count prefill-only requests that were answered together: the tokens of each."""
        for length in lengths:
            self._take_prompt(length)
        self.finished["stop"] += len(lengths)
        self.histograms["e2e_request_latency_seconds"].observe(seconds, len(lengths))

    def take_abort(self) -> None:
        self.finished["abort"] += 1

    def take_failures(self, num_failed: int) -> None:
        self.finished["error"] += num_failed

    def _take_prompt(self, num_tokens: int) -> None:
        self.counts["prompt_tokens"] += num_tokens
        self._observe(request_prompt_tokens=num_tokens)

    def _observe(self, **values: float | None) -> None:
        for name, value in values.items():
            self.histograms[name].observe(value)

    def text(self, model_name: str) -> str:
        """Return everything in Prometheus' text format."""
        return text_of(self.families(model_name))

    def families(self, model_name: str) -> Iterator[Family]:
        """Return everything by name. model_name: what clients call the model."""
        model = f'model_name="{_escaped(model_name)}",{self._which}'

        def of_model(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> Family:
            return family(f"vllm:{name}", kind, help_text, {f"{model}{further}": values[further] for further in values})

        gauges = self.gauges
        usage = gauges.used_blocks / gauges.num_blocks if gauges.num_blocks else 0.0
        for name, help_text, value in (
            ("num_requests_running", "Sequences in the batch.", gauges.running),
            ("num_requests_waiting", "Sequences in the queue.", gauges.waiting),
            ("num_requests_swapped", "Sequences whose blocks are in the host's pool.", gauges.swapped),
            ("kv_cache_usage_perc", "The share of KV blocks that are in use. 1 is all.", usage),
        ):
            yield of_model(name, "gauge", help_text, {"": value})
        counts = self.counts | {"prefix_cache_queries": gauges.prefix_queries, "prefix_cache_hits": gauges.prefix_hits}
        for name, help_text in _COUNTERS.items():
            yield of_model(f"{name}_total", "counter", help_text, {"": counts[name]})
        drafts = {
            f',draft="{_escaped(name)}"': totals for name, totals in (self.drafts or {"": DraftTotals("")}).items()
        }
        for name, (help_text, field) in _OF_DRAFTS.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            values = {draft: getattr(totals, field) for draft, totals in drafts.items()}
            yield of_model(f"spec_decode_{name}", kind, help_text, values)
        for index, which in enumerate(("accepted", "draft")):
            values = {
                f'{draft},position="{position}"': counts[index]
                for draft, totals in drafts.items()
                for position, counts in enumerate(totals.by_position)
            }
            help_text = f"{which.capitalize()} tokens by their position in a cycle."
            yield of_model(f"spec_decode_num_{which}_tokens_per_pos_total", "counter", help_text, values)
        yield family("vllm:cache_config_info", "gauge", "How the KV cache is divided.", {self._cache: 1})
        reasons = {f',finished_reason="{reason}"': number for reason, number in self.finished.items()}
        yield of_model("request_success_total", "counter", "Choices that have ended, by reason.", reasons)
        for name, histogram in self.histograms.items():
            header = _header(f"vllm:{name}", "histogram", _HISTOGRAMS[name][0])
            yield header, histogram.lines(f"vllm:{name}", model)


class HttpMetrics:
    """Counts the requests that have ended."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._num_refused = 0

    def take(self, route: str, method: str, status: int, seconds: float) -> None:
        labels = f'handler="{route}",method="{method if method in _METHODS else "other"}"'
        self._requests[f'{labels},status="{status}"'] += 1
        self._durations.setdefault(labels, Histogram(_DURATIONS)).observe(seconds)

    def take_refused_connection(self) -> None:
        self._num_refused += 1

    def families(self, num_open: int) -> Iterator[Family]:
        """Return the metrics. num_open: requests that are being answered."""
        yield family("http_requests_total", "counter", "Requests that have ended, by status.", self._requests)
        yield family("http_requests_in_progress", "gauge", "Requests that are being answered.", {"": num_open})
        refused = {"": self._num_refused}
        yield family("http_connections_refused_total", "counter", "Answered with 503, as all are in use.", refused)
        lines = [line for labels, histogram in self._durations.items() for line in histogram.lines(_DURATION, labels)]
        yield _header(_DURATION, "histogram", "From a request's head to the end of its answer."), lines


def process_families(processes: Mapping[str, int]) -> Iterator[Family]:
    """Return the metrics of processes, by a name and their id. Empty if the system does not tell them (`/proc`)."""
    values: dict[str, dict[str, float]] = {name: {} for name in _PROCESS}
    for name, pid in processes.items():
        with suppress(OSError, ValueError, IndexError):
            for metric, value in _read_process(Path("/proc") / str(pid)).items():
                values[metric][f'process="{name}"'] = value
    for name, (kind, text) in _PROCESS.items():
        if values[name]:
            yield family(name, kind, text, values[name])


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


def text_of(families: Iterable[Family]) -> str:
    """Write Prometheus' text format: each name once, with the values of all its families under it."""
    by_header: dict[str, list[str]] = {}
    for header, lines in families:
        by_header.setdefault(header, []).extend(lines)
    return "".join("\n".join((header, *lines, "")) for header, lines in by_header.items())


def _bounds_of_tokens(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    return [bound for power in range(len(str(most))) for digit in (1, 2, 5) if (bound := digit * 10**power) <= most]


def family(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> Family:
    """Build a metric with its lines. values: by their labels."""
    lines = [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items()]
    return _header(name, kind, help_text), lines


def _header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class ThroughputLine:
    """Writes the line that reports the throughput every few seconds, as vLLM words it."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._before = (0.0, 0, 0)

    def line(self, now: float) -> str | None:
        """Return the line for the time since the last one; None if nothing has happened since."""
        then, prompt_then, generated_then = self._before
        counts, gauges = self._metrics.counts, self._metrics.gauges
        self._before = now, counts["prompt_tokens"], counts["generation_tokens"]
        prompt, generated = counts["prompt_tokens"] - prompt_then, counts["generation_tokens"] - generated_then
        if not (generated or gauges.running or gauges.waiting) or not then:
            return None
        seconds = now - then
        hit_rate = 100 * gauges.prefix_hits / gauges.prefix_queries if gauges.prefix_queries else 0.0
        usage = 100 * gauges.used_blocks / gauges.num_blocks if gauges.num_blocks else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {gauges.running} reqs, Waiting: {gauges.waiting} reqs, "
            f"KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hit_rate:.1f}%"
        )
