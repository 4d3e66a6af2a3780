"""Counters, gauges and histograms under vLLM's names, in Prometheus' text format: dashboards made for it read them.

The histograms have vLLM's bounds, and below its least some finer ones: a small model's times would all lie there.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.messages import Gauges, StepSummary
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

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Observations by upper bound."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float | None, times: int = 1) -> None:
        """`value`, if there is one, `times` times."""
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
    """Takes in what the engine reports; writes it down when asked."""

    def __init__(
        self, model_name: str, max_model_len: int, num_blocks: int, block_size: int, replica: str | None = None
    ):
        """replica: which of several engines this is; None for the only one."""
        which = 'engine="0"' + ("" if replica is None else f',replica="{_escaped(replica)}"')
        self._cache = f'block_size="{block_size}",num_gpu_blocks="{num_blocks}",{which}'
        self._labels = f'model_name="{_escaped(model_name)}",{which}'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.drafts: dict[str, DraftTotals] = {}
        self.cached_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token = Histogram(_ITL)
        self.time_per_output_token = Histogram(_ITL)
        self.end_to_end = Histogram(_LONG)
        self.queue_time = Histogram(_LONG)
        self.inference_time = Histogram(_LONG)
        self.prefill_time = Histogram(_LONG)
        self.decode_time = Histogram(_LONG)
        tokens = _bounds_of_tokens(max_model_len)
        self.num_prompt_tokens = Histogram(tokens)
        self.num_generation_tokens = Histogram(tokens)
        self.most_generation_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.samples = Histogram(_SAMPLES)
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self._last_step_ended = 0.0

    def take_step(self, step: StepSummary) -> None:
        self.generation_tokens += step.num_generated
        self.preemptions += step.num_preempted
        self.iteration_tokens.observe(step.num_prefilled + step.num_generated)
        if step.num_decoding:  # each of them had its last token in the step before
            since = step.ended - self._last_step_ended if self._last_step_ended else step.milliseconds / 1e3
            self.inter_token.observe(since, step.num_decoding)
        self._last_step_ended = step.ended
        for name, proposed, accepted, won in step.cycles:
            self.drafts.setdefault(name, DraftTotals(name)).add(proposed, accepted, won)

    def take_output(self, output: RequestOutput, params: SamplingParams, arrived: float) -> None:
        """A request has ended that came in at `arrived`, in seconds on the monotonic clock."""
        self.max_tokens.observe(params.max_tokens)
        self.samples.observe(params.n)
        self.most_generation_tokens.observe(max(len(sample.token_ids) for sample in output.outputs))
        self.prompt_tokens += len(output.prompt_token_ids)
        self.num_prompt_tokens.observe(len(output.prompt_token_ids))
        self.cached_tokens += output.metrics.tokens_cached
        for sample in output.outputs:
            metrics = sample.metrics
            if sample.finish_reason is not None:
                self.finished[sample.finish_reason] += 1
            self.num_generation_tokens.observe(len(sample.token_ids))
            if metrics.first_token is None or metrics.last_token is None or metrics.admitted is None:
                continue
            self.time_to_first_token.observe(metrics.first_token - arrived)
            self.end_to_end.observe(metrics.last_token - arrived)
            self.queue_time.observe(metrics.admitted - arrived)
            self.inference_time.observe(metrics.last_token - metrics.admitted)
            self.prefill_time.observe(metrics.first_token - metrics.admitted)
            self.decode_time.observe(metrics.last_token - metrics.first_token)
            per_token = metrics.time_per_output_token_ms
            self.time_per_output_token.observe(None if per_token is None else per_token / 1e3)

    def take_answers(self, lengths: Sequence[int], seconds: float) -> None:
        """Requests that keep nothing have been answered together: the tokens of each."""
        for length in lengths:
            self.prompt_tokens += length
            self.num_prompt_tokens.observe(length)
        self.finished["stop"] += len(lengths)
        self.end_to_end.observe(seconds, len(lengths))

    def take_abort(self) -> None:
        self.finished["abort"] += 1

    def take_failures(self, num_failed: int) -> None:
        self.finished["error"] += num_failed

    def text(self, gauges: Gauges) -> str:
        """Everything, in Prometheus' text format."""
        usage = gauges.used_blocks / gauges.num_blocks if gauges.num_blocks else 0.0
        lines: list[str] = []
        for name, help_text, value in (
            ("num_requests_running", "Sequences in the batch.", gauges.running),
            ("num_requests_waiting", "Sequences in the queue.", gauges.waiting),
            ("num_requests_swapped", "Sequences whose blocks are in the host's pool.", gauges.swapped),
            ("kv_cache_usage_perc", "The share of KV blocks that are in use. 1 is all.", usage),
        ):
            lines += self._one(f"vllm:{name}", "gauge", help_text, value)
        for name, help_text, value in (
            ("num_preemptions", "Sequences that had to give their blocks up.", self.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that have ended.", self.prompt_tokens),
            ("prompt_tokens_cached", "Of those, the ones found in the cache.", self.cached_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", gauges.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", gauges.prefix_hits),
        ):
            lines += self._one(f"vllm:{name}_total", "counter", help_text, value)
        lines += self._speculation()
        lines += _header("vllm:cache_config_info", "gauge", "How the KV cache is divided.")
        lines.append(f"vllm:cache_config_info{{{self._cache}}} 1")
        lines += _header("vllm:request_success_total", "counter", "Choices that have ended, by reason.")
        for reason, number in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {number}')
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between one token and the next.", self.inter_token),
            ("request_time_per_output_token_seconds", "The mean of a choice's.", self.time_per_output_token),
            ("time_per_output_token_seconds", "The same under its older name.", self.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.end_to_end),
            ("request_queue_time_seconds", "From arrival to admission.", self.queue_time),
            ("request_inference_time_seconds", "From admission to the last token.", self.inference_time),
            ("request_prefill_time_seconds", "From admission to the first token.", self.prefill_time),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode_time),
            ("request_prompt_tokens", "Tokens of a prompt.", self.num_prompt_tokens),
            ("request_generation_tokens", "Tokens of a choice.", self.num_generation_tokens),
            ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", self.most_generation_tokens),
            ("request_params_max_tokens", "Tokens that a request may have.", self.max_tokens),
            ("request_params_n", "Choices that a request asks for.", self.samples),
            ("iteration_tokens_total", "Prompt tokens computed and tokens generated in a step.", self.iteration_tokens),
        ):
            lines += _header(f"vllm:{name}", "histogram", help_text)
            lines += histogram.lines(f"vllm:{name}", self._labels)
        return "\n".join(lines) + "\n"

    def _speculation(self) -> list[str]:
        """vLLM's counters with a label for the draft; a rate is one counter over another."""
        lines = []
        drafts = list(self.drafts.values()) or [DraftTotals("")]
        for name, kind, help_text, value_of in (
            ("num_drafts_total", "counter", "Cycles: a draft proposed for a sequence.", lambda draft: draft.cycles),
            ("num_draft_tokens_total", "counter", "Draft tokens.", lambda draft: draft.proposed),
            ("num_accepted_tokens_total", "counter", "Draft tokens accepted.", lambda draft: draft.accepted),
            (
                "num_won_total",
                "counter",
                "Cycles whose tokens were emitted, of several drafts.",
                lambda draft: draft.won,
            ),
            ("draft_acceptance_rate", "gauge", "Accepted over proposed.", lambda draft: draft.acceptance),
        ):
            lines += _header(f"vllm:spec_decode_{name}", kind, help_text)
            lines += [
                f'vllm:spec_decode_{name}{{{self._labels},draft="{_escaped(draft.name)}"}} {value_of(draft)}'
                for draft in drafts
            ]
        for index, which in enumerate(("accepted", "draft")):
            name = f"vllm:spec_decode_num_{which}_tokens_per_pos_total"
            lines += _header(name, "counter", f"{which.capitalize()} tokens by their position in a cycle.")
            lines += [
                f'{name}{{{self._labels},draft="{_escaped(draft.name)}",position="{position}"}} {counts[index]}'
                for draft in drafts
                for position, counts in enumerate(draft.by_position)
            ]
        return lines

    def _one(self, name: str, kind: str, help_text: str, value: float) -> list[str]:
        return [*_header(name, kind, help_text), f"{name}{{{self._labels}}} {value}"]


def _bounds_of_tokens(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    return [bound for power in range(len(str(most))) for digit in (1, 2, 5) if (bound := digit * 10**power) <= most]


def _header(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class ThroughputLine:
    """The line that says every few seconds how it goes, as vLLM words it."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._before = (0.0, 0, 0)

    def line(self, now: float, gauges: Gauges) -> str | None:
        """The line for the time since the last one; None where nothing has happened since."""
        then, prompt, generated = self._before
        metrics = self._metrics
        self._before = now, metrics.prompt_tokens, metrics.generation_tokens
        if not (metrics.generation_tokens - generated or gauges.running or gauges.waiting) or not then:
            return None
        seconds = now - then
        hit_rate = 100 * gauges.prefix_hits / gauges.prefix_queries if gauges.prefix_queries else 0.0
        usage = 100 * gauges.used_blocks / gauges.num_blocks if gauges.num_blocks else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {(metrics.prompt_tokens - prompt) / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {(metrics.generation_tokens - generated) / seconds:.1f} tokens/s, "
            f"Running: {gauges.running} reqs, Waiting: {gauges.waiting} reqs, "
            f"KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hit_rate:.1f}%"
        )
