"""What a session on a GPU asks (`gpu_session.py`), a function per stage. Each runs in a process of its own.

Only the standard library, NumPy, torch and Triton are needed, and models are drawn on the device. A stage that needs
more says what, and is skipped without it. In a rehearsal everything runs on the CPU, at toy sizes and interpreted: its
figures mean nothing, and it shows before the GPU comes whether anything breaks.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from forge.bench.gpu_session import Report, Skip, one_line

PACKAGES = {
    "core": ("numpy", "torch", "triton"),
    "bundled model": ("tokenizers",),
    "CPU": ("numba", "llvmlite", "jinja2"),
    "model files": ("gguf",),
    "command line": ("typer", "rich"),
    "server": ("fastapi", "uvicorn", "pydantic", "httptools", "orjson", "fastokens"),
    "tests": ("pytest", "xdist", "hypothesis"),
    "peers": ("transformers", "vllm", "sglang"),
}
ROOT = Path(__file__).parents[2]
REPEATED = 50
"""How often a kernel is checked."""
SIZES = ("qwen3-0.6b", "qwen3-4b")


# The machine


def machine(report: Report) -> None:
    """Nothing but torch is imported, and that only after the rest is known."""
    missing = {use: [name for name in names if find_spec(name) is None] for use, names in PACKAGES.items()}
    report("missing packages", {use: names for use, names in missing.items() if names})
    report("python", f"{platform.python_version()}, {os.cpu_count()} cores")
    with report.part("nvidia-smi"):
        report("nvidia-smi", _nvidia_smi())
    import numpy
    import torch

    triton = "missing"
    if not missing["core"]:
        import triton as found

        triton = found.__version__
    report(
        "versions",
        {"torch": torch.__version__, "cuda": torch.version.cuda, "numpy": numpy.__version__} | {"triton": triton},
    )
    if report.rehearsal:
        return
    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    report(
        "device",
        {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "free_bytes": free,
            "total_bytes": total,
        },
    )
    from forge.bench.cuda_limits_worker import measure

    report("limits", dict(measure(4 << 30, 1.0)))
    with report.part("clocks under load"):
        report("clocks under load", _nvidia_smi())


def _nvidia_smi() -> dict[str, str]:
    fields = ["name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit"]
    fields += ["temperature.gpu", "memory.used", "memory.total"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return dict(zip(fields, (value.strip() for value in out.splitlines()[0].split(",")), strict=False))


# Kernels


def compiling(report: Report) -> None:
    """All kernels of both models, dense and Q8_0, into Triton's cache on disk."""
    from forge.backends.cuda import warm_up
    from forge.backends.cuda.ahead_of_time import weightless_model
    from forge.backends.cuda.backend import DEPENDENT_LAUNCH, CudaBackend
    from forge.gguf import GGMLType

    with _device(report) as device:
        import torch

        dependent = device == "cuda" and torch.cuda.get_device_capability() >= DEPENDENT_LAUNCH
        listed: dict = {}
        for name in SIZES:
            for kind in (GGMLType.BF16, GGMLType.Q8_0):
                model = weightless_model(_config(report, name, 2), kind, lambda launch: None, graphs=True)
                layout = model.kv_layout(1, 16, model.backend.default_kv_dtype)
                model.prepare(layout)
                assert isinstance(model.backend, CudaBackend)
                listed |= dict.fromkeys(model.backend.expected_launches(model.forward_pass, layout, dependent))
        report("kernels", len(listed))
        if report.rehearsal:
            return
        started, reported = time.monotonic(), 0.0

        def progress(done: int, of: int) -> None:
            nonlocal reported
            if done == of or time.monotonic() - reported > 5:
                reported = time.monotonic()
                report("progress", f"{done} of {of} after {reported - started:.1f} s")

        failed = warm_up.compile_all(listed, progress)
        report("seconds", round(time.monotonic() - started, 1))
        report("failed", failed)


def kernels(report: Report) -> None:
    """Each kernel as it is and with all switches on, after the kernel before it and while that still runs."""
    from forge.backends.cuda import warm_up
    from forge.backends.cuda.shapes import DEFAULT_TUNING
    from forge.bench.gpu_checks import ALL_SWITCHES, Cases, Checks

    times, cases = REPEATED, Cases()
    if report.rehearsal:
        times, cases = 2, Cases(rows=(1, 3), contexts=(17,), sequences=(2,), spans=((5, 9),))
    with _device(report) as device:
        import torch

        on_gpu = device == "cuda"
        count = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 132
        names = SIZES if on_gpu else SIZES[:1]  # at toy sizes both are one
        variants = list(product(names, (True, False) if on_gpu else (False,), (DEFAULT_TUNING, ALL_SWITCHES)))
        listed: dict = {}
        for name, dependent, tuning in variants:
            listed |= dict.fromkeys(Checks.launches(_config(report, name, 2), dependent, tuning, count, cases))
        report("kernels", len(listed))
        if on_gpu:
            report("not compiled", warm_up.compile_all(listed))
        wrong = 0
        for name, dependent, tuning in variants:
            checks = Checks(_config(report, name, 2), device, dependent, times, tuning)
            parts = checks.parts(cases)
            if tuning is DEFAULT_TUNING:
                parts["draws"] = checks.draws(max(cases.rows))
            switched = ", all switches" if tuning is ALL_SWITCHES else ""
            title, worst = f"{name}, {'dependent' if dependent else 'ordered'}{switched}", 0.0
            for part, results in parts.items():
                with report.part(f"{title}: {part} stopped"), torch.inference_mode():
                    for checked in results:
                        wrong += not checked.is_right
                        if not checked.is_right:
                            report(f"WRONG {title}: {checked.name}", asdict(checked))
                        else:
                            worst = max(worst, checked.error)
                            report(f"last right, {title}", f"{checked.name}: {checked.error:.1e}", quiet=True)
            report(f"largest error of a right one, {title}", worst)
        report("wrong", wrong)


# Models


def bundled(report: Report) -> None:
    """The same prompts and greedy tokens, and how far logits are apart."""
    _needs("tokenizers")
    import numpy as np

    from forge import LLM, SamplingParams

    prompts = ["Once upon a time", "The old ferryman", "In the morning the fox"]
    params = SamplingParams(max_tokens=4 if report.rehearsal else 64, ignore_eos=True)
    with _device(report) as device:
        if report.rehearsal:
            report("left out", "interpreted, the bundled model would take minutes")
            return
        on_cpu = LLM("tales", kv="paged", device="reference")  # which needs no compiler
        want = on_cpu.generate(prompts, params)
        ids = on_cpu.tokenizer.encode(prompts[0]) + list(want[0].outputs[0].token_ids)
        logits = on_cpu.logits(ids)
        for options in ({}, {"invariant": True}, {"kernels": "torch"}):
            with report.part(str(options or "as it is")):
                llm = LLM("tales", kv="paged", device=device, num_blocks=256, **options)
                got = llm.generate(prompts, params)
                ours = np.asarray(llm.logits(ids))
                report(
                    str(options or "as it is"),
                    {
                        "relative error of the logits": float(np.linalg.norm(ours - logits) / np.linalg.norm(logits)),
                        "equal tokens": [
                            sum(a == b for a, b in zip(g.outputs[0].token_ids, w.outputs[0].token_ids, strict=True))
                            for g, w in zip(got, want, strict=True)
                        ],
                        "of": params.max_tokens,
                        "load_seconds": llm.load_seconds,
                    },
                )


def steps(report: Report) -> None:
    from forge.bench.cases import CUDA_LOADS, CUDA_STEPS

    with _device(report) as device:
        bench = _Bench(report, device, "qwen3-0.6b", max_sequences=64, max_context=2176)
        for case in CUDA_STEPS if not report.rehearsal else ():
            with report.part(case.name):
                report(case.name, bench.step(case))
        with report.part("profile"):
            report("profile", bench.profile())
        with report.part("single stream"):
            report("single stream", bench.single_stream())
        with report.part("choosing tokens"):
            report("choosing tokens, ms", bench.choosing())
        for load in CUDA_LOADS[:2]:
            with report.part(load.name):
                report(load.name, bench.load(load))


def large(report: Report) -> None:
    from forge.bench.cases import CUDA_LOADS, CUDA_STEPS

    with _device(report) as device:
        bench = _Bench(report, device, "qwen3-4b", max_sequences=128, max_context=640)
        for name in ("512in1@1", "512in1@16", "512in1@96", "512in1@128"):
            with report.part(name):
                load = next(load for load in CUDA_LOADS if load.name == name)
                report(name, bench.load(replace(load, requests=max(load.concurrency * 6, load.requests // 4))))
        for name in ("decode1@160", "decode16@160", "prefill512") if not report.rehearsal else ():
            with report.part(name):
                report(name, bench.step(next(case for case in CUDA_STEPS if case.name == name)))


def quantized(report: Report) -> None:
    from forge.backends.cuda.weights import KIND_NAMES
    from forge.bench.cases import CUDA_STEPS

    with _device(report) as device:
        for name in SIZES[:1] if report.rehearsal else SIZES:
            for kind in ("q8", "q4") if not report.rehearsal else ("q8",):
                with report.part(f"{name} {kind}"):
                    bench = _Bench(report, device, name, 16, 256, KIND_NAMES.index(kind))
                    if report.rehearsal:
                        report(f"{name} {kind}", bench.single_stream())
                        continue
                    for case in ("decode1@160", "decode16@160", "prefill128"):
                        figures = bench.step(next(candidate for candidate in CUDA_STEPS if candidate.name == case))
                        report(f"{name} {kind} {case}", figures)


def switches(report: Report) -> None:
    """The same steps with each switch on, and with dependent launches off."""
    from forge.backends.cuda import warm_up
    from forge.backends.cuda.backend import CudaBackend
    from forge.backends.cuda.launches import TritonLauncher
    from forge.backends.cuda.shapes import Tuning
    from forge.bench.cases import Case

    names = (1, 160), (4, 160), (16, 160), (24, 160), (48, 160), (96, 160), (140, 160), (1, 2048), (4, 2048)
    cases = [Case(f"decode{rows}@{c}", f"decode {rows} @ {c:,}", "decode", rows, c, 1) for rows, c in names]
    tunings = {
        "as it is": Tuning(),
        "split_k": Tuning(split_k=True),
        "prefetch": Tuning(prefetch=True),
        "split_k, prefetch": Tuning(split_k=True, prefetch=True),
        "round_splits_up": Tuning(round_splits_up=True),
        "round_splits_up, new_key_last": Tuning(round_splits_up=True, new_key_last=True),
        "tile_rows 32": Tuning(tile_rows=32),
        "tile_rows 64": Tuning(tile_rows=64),
        "tile_rows 128": Tuning(tile_rows=128),
        "fine_buckets": Tuning(fine_buckets=True),
        "pause_gc": Tuning(pause_gc=True),
        "no dependent launches": None,
    }
    with _device(report) as device:
        llm_of = partial(_drawn, report, device, "qwen3-0.6b", 1, 2176)
        for name, tuning in tunings.items():
            with report.part(name):
                options = {"launcher": TritonLauncher(False)} if tuning is None else {"tuning": tuning}
                bench = _Bench.around(report, llm_of(backend=CudaBackend(device, **options)))
                if report.rehearsal:
                    report(name, bench.single_stream())
                    continue
                if tuning is None:  # the backend compiles in parallel only what it launches itself
                    warm_up.compile_missing(bench.expected_launches(dependent=False))
                for case in cases:
                    report(f"{case.name} {name}", bench.step(case, turns=3))


def tiles(report: Report) -> None:
    from forge.backends.cuda import warm_up
    from forge.bench.cuda_tiles import best_of, measure

    with _device(report) as device:
        import torch

        for name, rows in {"qwen3-0.6b": [1, 4, 16, 64], "qwen3-4b": [1, 16, 128]}.items():
            timings = []
            with report.part(f"{name}: stopped"), torch.inference_mode():
                rows = rows[:2] if report.rehearsal else rows
                options: dict[str, Any] = {"compile_all": warm_up.compile_all}
                if report.rehearsal:
                    options = {"clock": lambda call: call() or 1.0, "least_bytes": 1}
                for timing in measure(_config(report, name, 2), 0, rows, device, **options):
                    print(timing, flush=True)
                    timings.append(timing)
                    if report.rehearsal and len(timings) > 3:
                        break
                    if timing.tile is None:
                        report(f"{name}, {timing.product}, {timing.rows} rows", _best(timings, timing), quiet=True)
            for timing in best_of(timings):
                report(f"{name}, {timing.product}, {timing.rows} rows", _best(timings, timing))


def _best(timings: list, like) -> list[str]:
    from forge.bench.cuda_tiles import best_of

    return [str(timing) for timing in best_of(timings) if (timing.product, timing.rows) == (like.product, like.rows)]


# Everything around


def tests(report: Report) -> None:
    _needs("pytest")
    if not (ROOT / "tests/backends/cuda").exists():
        raise Skip("the tests are not here")
    parallel = ["-n", "8"] if find_spec("xdist") else []
    limits = ["-k", "test_storage"] if report.rehearsal else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--confcutdir=tests/backends/cuda",  # the other tests' set-up needs hypothesis
        "tests/backends/cuda",
    ]
    done = subprocess.run(
        [*command, *parallel, *limits], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    report("failed", [line for line in lines if line.startswith(("FAILED", "ERROR"))][:60])
    report("summary", lines[-1] if lines else "no output")


def record(report: Report) -> None:
    _needs("typer", "rich", "numba", "tokenizers", "jinja2")
    if report.rehearsal:
        raise Skip("forge cuda --record needs a GPU")
    path = report.out / "cuda_run.json"
    command = [sys.executable, "-m", "forge", "cuda", "Once upon a time", "32", "--json", "--record", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-8000:], flush=True)
    if done.returncode:
        raise RuntimeError(one_line((done.stderr.strip() or done.stdout.strip())[-300:]))
    report("runs", json.loads(path.read_text())["runs"])


def http(report: Report) -> None:
    _needs("fastapi", "uvicorn", "httptools", "orjson", "typer", "rich", "gguf")
    _compare(report, "qwen3-0.6b", ("128in1@1", "128in32@4"), ("none",))


def peers(report: Report) -> None:
    _needs("transformers", "gguf", "typer", "rich")
    _compare(report, "qwen3-0.6b", ("decode1@160", "decode16@160", "128in1@1", "128in32@4"), ("transformers",))


def _compare(report: Report, model: str, only: tuple[str, ...], names: tuple[str, ...]) -> None:
    """A run of `forge bench cuda`, reported after every figure."""
    from forge.bench.cuda import plan_for, run

    if report.rehearsal:
        raise Skip("forge bench cuda needs a GPU")
    plan = plan_for(model, "BF16", ",".join(only), list(names), "paged")
    for comparison in run(plan, lambda text: print(text, flush=True)):
        report("result", json.loads(json.dumps(comparison, default=asdict)))


def _needs(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise Skip(f"needs {', '.join(missing)}")


# What is measured


@contextmanager
def _device(report: Report) -> Iterator[str]:
    """`cuda`, or `cpu` with a sound interpreter."""
    if not report.rehearsal:
        import torch

        if not torch.cuda.is_available():
            raise Skip("torch sees no GPU")
        if find_spec("triton") is None:
            raise Skip("needs triton")
        yield "cuda"
        return
    from forge.backends.cuda.interpreter import repaired_interpreter

    with repaired_interpreter():
        yield "cpu"


def _config(report: Report, name: str, num_layers: int | None = None):
    from forge.model.synth import SHAPES, synthetic_config

    config = SHAPES[name]
    if report.rehearsal:
        config = synthetic_config(
            num_layers=1,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=288,
        )
    return replace(config, num_layers=min(num_layers or config.num_layers, config.num_layers))


def _drawn(report: Report, device: str, name: str, max_sequences: int, max_context: int, kind: int = 0, backend=None):
    from forge.bench.drawn_model import drawn_llm

    if report.rehearsal:
        max_sequences, max_context = 4, 64
    return drawn_llm(
        _config(report, name),
        kind,
        device=device,
        backend=backend,
        kv="paged",
        max_model_len=max_context,
        max_num_seqs=max_sequences,
        num_blocks=max_sequences * -(-max_context // 16),
    )


class _Bench:
    """Steps and loads of one drawn model."""

    def __init__(self, report: Report, device: str, name: str, max_sequences: int, max_context: int, kind: int = 0):
        started = time.monotonic()
        llm = _drawn(report, device, name, max_sequences, max_context, kind)
        self._begin(report, llm)
        report(f"{llm.model_name} {name} ready", {"seconds": round(time.monotonic() - started, 2)})

    @classmethod
    def around(cls, report: Report, llm) -> "_Bench":
        bench = cls.__new__(cls)
        bench._begin(report, llm)
        return bench

    def _begin(self, report: Report, llm) -> None:
        from forge.bench.forge_worker import ForgeWorker

        self._report, self._llm = report, llm
        self._on_gpu = not report.rehearsal
        self._worker = ForgeWorker(llm)

    def expected_launches(self, dependent: bool) -> list:
        model = self._llm.model
        layout = model.kv_layout(1, 16, model.backend.default_kv_dtype)
        return model.backend.expected_launches(model.forward_pass, layout, dependent)

    def step(self, case, turns: int = 5) -> dict[str, Any]:
        """Time one step by two clocks: the host's, until it knows the tokens, and the device's own, of graph
        replays."""
        ids = case.token_ids(self._llm.model.vocab_size)
        prepared = self._worker.prepare(case.kind, case.context, ids)
        seconds = [median(self._worker.turn(20, 0.1)["seconds"]) for _ in range(turns)]
        figures = {
            "host_ms": round(1e3 * median(seconds), 4),
            "spread_ms": [round(1e3 * min(seconds), 4), round(1e3 * max(seconds), 4)],
            "device_ms": self._device_ms(),
            "how": prepared["setting"],
        }
        if figures["device_ms"] and case.kind == "decode":
            bytes_read = self._worker.read_bytes + case.sequences * case.context * self._worker.kv_bytes
            figures["TB_per_s"] = round(bytes_read / figures["device_ms"] / 1e9, 3)
        return figures

    def _device_ms(self) -> float | None:
        """Of a replay of the last step's graph, many in a row; None if it was no graph's."""
        graph = self._worker.last_graph
        if graph is None or not self._on_gpu:
            return None
        import torch

        from forge.bench.cuda_limits_worker import fastest

        return round(1e3 * fastest(torch, graph.replay, 0.1), 4)

    def profile(self) -> list[dict[str, Any]]:
        """Return the kernels that ten replays of `decode1@160` spend most time in."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        from forge.bench.cases import CUDA_STEPS

        if not self._on_gpu:
            return []
        self.step(CUDA_STEPS[0], turns=1)
        graph, count = self._worker.last_graph, 10
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            for _ in range(count):
                graph.replay()
            torch.cuda.synchronize()
        table = profiled.key_averages()
        rows = [kernel for kernel in table if kernel.self_device_time_total > 0]
        total = sum(kernel.self_device_time_total for kernel in rows)
        rows.sort(key=lambda kernel: -kernel.self_device_time_total)
        for kernel in rows:  # all of them, in the log
            print(
                f"{kernel.self_device_time_total / count:9.2f} us a step  {kernel.count / count:6.1f} x  {kernel.key}"
            )
        return [
            {
                "kernel": kernel.key[:80],
                "per step": kernel.count / count,
                "us each": round(kernel.self_device_time_total / kernel.count, 2),
                "us per step": round(kernel.self_device_time_total / count, 2),
                "share": round(kernel.self_device_time_total / total, 3),
            }
            for kernel in rows[:20]
        ]

    def choosing(self) -> dict[str, float]:
        """Return what it takes to draw a step's tokens on the device, with the launches and until the host knows
        them."""
        import torch

        from forge.backends.cuda.sampling import SamplingRows, sample
        from forge.bench.gpu_checks import DRAWN
        from forge.model.logits import Draw

        backend, vocabulary = self._llm.model.backend, self._llm.model.vocab_size
        device, launch = backend._device, backend._fused.launches.launch
        times = {}
        for rows, params in product((1, 16, 64), DRAWN):
            logits = torch.randn(rows, vocabulary, device=device)
            draws = [Draw(params, row, 0, range(200), 100) for row in range(rows)]
            seconds = []
            for _ in range(3 if self._report.rehearsal else 10):
                started = time.perf_counter()
                sample(logits, SamplingRows.of(draws, vocabulary, device), launch).tolist()
                seconds.append(time.perf_counter() - started)
            settings = f"top_p {params.top_p:g}, presence_penalty {params.presence_penalty:g}"
            times[f"{rows} rows, {settings}"] = round(1e3 * median(seconds), 3)
        return times

    def single_stream(self) -> dict[str, Any]:
        """Time one request through the engine: milliseconds per token, in a steady state."""
        from forge import SamplingParams

        prompt, count, rounds = list(range(5, 133)), 512, 2  # in the second round everything is captured
        if self._report.rehearsal:
            prompt, count, rounds = prompt[:4], 2, 1
        count = min(count, self._llm.max_model_len - len(prompt))
        figures = {}
        greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        drawn = replace(greedy, temperature=0.8, top_p=0.95, seed=1)
        for name, params in (("greedy", greedy), ("drawn", drawn)):
            moments = []
            for _ in range(rounds):
                moments = [time.perf_counter()]
                run = self._llm.start([prompt], params)
                moments += [time.perf_counter() for _ in run]
            spans = [1e3 * (b - a) for a, b in pairwise(moments[1:])]
            steady = sorted(spans[len(spans) // 4 :])
            figures[name] = {
                "ttft_ms": round(1e3 * (moments[1] - moments[0]), 3),
                "per_token_ms": round(median(steady), 4),
                "p95_ms": round(steady[math.ceil(0.95 * (len(steady) - 1))], 4),
                "tokens_per_s": round(1e3 * len(spans) / sum(spans), 1),
            }
        return figures

    def load(self, load) -> dict[str, Any]:
        """Requests in a closed loop, in process."""
        from forge.bench.closed_loop import load_figures

        if self._report.rehearsal:
            load = replace(load, prompt_tokens=6, output_tokens=2, concurrency=2, requests=3)
        figures = load_figures(load, self._worker.requests(**load.question))
        milliseconds = {}
        for name in ("first_token", "per_token", "end"):
            if figures[name] is not None:
                milliseconds[f"{name}_ms"] = {key: round(1e3 * value, 3) for key, value in figures[name].items()}
        return {"requests_per_s": round(figures["requests_per_second"], 2), **milliseconds}
