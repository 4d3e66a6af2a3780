"""ik_llama.cpp, or llama.cpp, as a peer through its program `llama-batched-bench`: a turn is a run of it.

Runs with any interpreter, without forge too. Prompts and answers are whole: a prefill is the second of two runs
over the prompt, or the only run if the prompt is longer than `TRIAL_TOKENS`; a decode is the mean of 32 steps around
the case's context. Its best setting is the fastest of `SETTINGS` that the program knows, tried before every figure. It
shows no logits.
"""

import os
import resource
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from forge.bench.worker import TRIAL_TOKENS, Missing, Worker, for_trial, plural, timed

PROGRAM = "llama-batched-bench"
INSTALL = f"build github.com/ikawrakow/ik_llama.cpp (cmake --target {PROGRAM}), give its build/bin as --peer-bin"
SETTINGS = {
    "as it is": (),
    "repacked": ("-rtr",),
    "repacked, 8-bit KV": ("-rtr", "-ctk", "q8_0", "-ctv", "q8_0"),
    "8-bit KV": ("-ctk", "q8_0", "-ctv", "q8_0"),
}
STEPS = 32
"""Steps of a decode."""


class LlamaBinaryWorker(Worker):
    """The program, and the arguments of the case at hand."""

    def load(
        self, model: str, threads: int, scratch: str, binary: str | None = None, **others: Any
    ) -> Mapping[str, Any]:
        """Find the program and its arguments. binary: the program, or the folder that it is in. scratch: a folder in
        which it runs, and leaves its log."""
        if binary is None:
            raise Missing(INSTALL)
        self._program = os.path.abspath(os.path.join(binary, PROGRAM) if os.path.isdir(binary) else binary)
        self._folder = scratch
        try:
            usage = subprocess.run([self._program, "--help"], cwd=self._folder, capture_output=True, text=True).stdout
        except OSError as error:
            raise Missing(f"{self._program}: {error.strerror}; {INSTALL}") from None
        self._own = "-rtr" in usage
        self._arguments = ["-m", os.path.abspath(model), "-t", str(threads), "-tb", str(threads)]
        _, seconds = timed(lambda: self._seconds("prefill", 1, 1))
        name = "ik_llama.cpp" if self._own else "llama.cpp, not ik_llama.cpp"
        description = f"{name}: {PROGRAM}, {plural(threads)}; its load is a whole run of one token"
        return {"description": description, "seconds": seconds, "first_time": False}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        def case(context: int, token_ids: list[list[int]]) -> tuple[str, int, int]:
            prompt = len(token_ids[0]) if kind == "prefill" else max(1, context - STEPS // 2)
            return kind, prompt, len(token_ids)

        trial, trials = case(*for_trial(context, token_ids)), {}
        for name, setting in SETTINGS.items():
            if self._own or "-rtr" not in setting:
                trials[name] = self._seconds(*trial, *setting)
        best = min(trials, key=lambda name: trials[name])
        self._chosen = partial(self._seconds, *case(context, token_ids), *SETTINGS[best])
        return {"setting": f"flash attention, {best}", "seconds": trials[best]}

    def logits(self, token_ids: list[int]) -> Mapping[str, Any]:
        raise Missing("it shows no logits")

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        return {"seconds": [self._chosen()], "top_tokens": []}

    def memory(self) -> Mapping[str, Any]:
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}

    def _seconds(self, kind: str, prompt: int, sequences: int, *setting: str) -> float:
        """Run a prefill or a decode by itself; return the seconds of a step, from the last row of the program's
        table."""
        steps = 1 if kind == "prefill" else STEPS
        twice = kind == "prefill" and prompt <= TRIAL_TOKENS
        counts = {"-npp": prompt, "-ntg": steps, "-npl": "1,1" if twice else sequences}
        counts |= {"-c": -(-sequences * (prompt + steps + 16) // 256) * 256, "-b": 2048, "-ub": 512}
        arguments = [str(part) for pair in counts.items() for part in pair]
        command = [self._program, *self._arguments, *arguments, "-fa", "on", *setting]
        run = subprocess.run(command, cwd=self._folder, capture_output=True, text=True)
        rows = [line.strip("| ").split("|") for line in (run.stdout + run.stderr).split("\n") if line.startswith("|")]
        if run.returncode or len(rows) < 3:
            raise RuntimeError(f"{PROGRAM} ended with {run.returncode}: {(run.stderr or run.stdout)[-200:]}")
        return float(rows[-1][4 if kind == "prefill" else 6]) / steps
