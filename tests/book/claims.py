"""Every chapter under options of its own, with several models, on an idle and a busy machine: which claims are wrong?

    python -m tests.book.claims [CHAPTER …]      prints a table of every combination, with what is wrong in each

A chapter is read as `forge CHAPTER OPTIONS` reads it. A busy machine is a clock: each look at it may find that time
has passed in which the program did not run. So times are as long and as uneven as beside other programs, alike
for the same seed, and nothing has to be loaded.
"""

import contextlib
import io
import random
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from forge.book.catalog import entries
from forge.book.chapter import Block, Check, Finding, Predict, Prose, Recap
from forge.book.given import OtherLoad
from forge.book.session import Session, explanation
from forge.cli import chapters
from forge.cli.main import main
from forge.views.formatting import NOTHING
from tests.small_models import write_small_qwen3

CONTEXT = 4096
"""Of the synthetic model: more than the longest prompt of a chapter."""
BUNDLED, HASH, SYNTHETIC = "bundled", "hash", "synthetic"
MODELS = (BUNDLED, HASH, SYNTHETIC)
OPTIONS: dict[str, tuple[str, ...]] = {
    "naive": ("", '"The fox" 2', "Once 1", '"The fox and the lantern, and the old oak" 24', "--threads 1"),
    "kv-cache": ("", '"The fox" 2', "Once 1", '"The fox and the lantern, and the old oak" 24', "--threads 1"),
    "kernels": ("", "--threads 1", "--type F16", "--type Q4_0 --type F16", "--type Q4_K_M"),
    "paged": ("", "--sequences 1", "--num-blocks 16", "--block-size 64 --num-blocks 16", "--max-model-len 64",
              "--sequences 40"),
    "prefix": (
        "", "--branches 1", "--branches 6", "--branch-at 1", "--branch-at 29", "--requests 2", "--requests 9",
        "--block-size 64", "--block-size 1 --num-blocks 1000", "Once 4", "--num-blocks 20",
    ),
    "batching": (
        "", "--requests 1", "--requests 2", "--requests 5", "--prompt-tokens 1", "--max-tokens 1", "--max-tokens 8",
        "--requests 17 --max-tokens 64", "--seed 3", "--prompt-tokens 200 --requests 8",
    ),
    "speculation": (
        "", "--temperature 0.9", "--temperature 0.9 --seed 3", "--temperature 0.9 --acceptance rejection", "--k 1",
        "--k 12", '"The fox" 2', "Once 1", "--kv prefix", "--speculate ngram", "--speculate-fixed",
        "--model hash --draft hash:0.5",
        "--draft tales-bad-draft", "--draft tales-draft --draft tales-bad-draft", "--threads 1",
        "--draft tales-draft --draft tales-bad-draft --temperature 0.9 --acceptance rejection",
    ),
    "oneshot": (
        "", "--requests 1", "--requests 3", "--max-tokens 2", "--kv off", "--kv prefix", "--kv basic",
        "--num-blocks 32", "--max-num-seqs 1", "--prefill-only-tokens 64",
    ),
    "serving": (
        "", "--clients 1", "--clients 20 --max-num-seqs 2", "--max-tokens 1", "--num-blocks 40",
        "--kv off --max-tokens 32", "--every 0", "--every 200 --clients 2",
    ),
    "cuda": ("", '"The fox" 2', "--threads 1", "--no-graphs"),
    "constrained": (
        "", "--choice a --choice b", "--choice happy", "--fields mood", "--ask record",
        "--fields hero,mood --ask record",
        '--regex "[a-z]+"', '--regex "(Nutmeg|The fox) was (happy|sad)\\."', '"The fox met"', '"The fox met" 2',
        "--choice HAPPY --choice SAD",
    ),
    "cluster": (
        "", "--replicas 1", "--replicas 3", "--requests 4", "--requests 8", "--threshold 0", "--num-blocks 64",
        "--num-blocks 20", "--router prefix", "--router round-robin", "--router least-tokens --router prefix-estimate",
    ),
}  # fmt: skip
"""Of each chapter, the options under which it is read. An empty one is the chapter as it stands."""


@dataclass(frozen=True)
class Case:
    """One reading."""

    chapter: str
    options: str
    model: str
    busy: int | None
    """The seed of the busy machine; None for an idle one. With an odd seed its load is noticed, as on Linux; with an
    even one it is not, as where a hypervisor takes the time."""

    def __str__(self) -> str:
        machine = "idle" if self.busy is None else f"busy {self.busy}"
        return f"{self.chapter:<12} {self.options or '(as it stands)':<66} {self.model:<10} {machine}"


@dataclass(frozen=True)
class Result:
    """What a reading came to."""

    status: int
    wrong: tuple[str, ...]
    """What should not have been on a page."""
    held: int = 0
    unclaimed: int = 0
    """Claims that held, and those whose condition was not met."""
    seconds: float = 0.0


def cases(chapter: str, busy: Sequence[int | None] = (None, 0, 1)) -> Iterator[Case]:
    for options in OPTIONS[chapter]:
        for model in MODELS:
            if fits(chapter, options, model):
                yield from (Case(chapter, options, model, seed) for seed in busy)


def fits(chapter: str, options: str, model: str) -> bool:
    """Whether the options can be given with the model: the hash model has no file to measure; a draft has its target's
    vocabulary; and where a token is a byte, a prompt has more of them than a small pool holds."""
    if chapter == "kernels" and model == HASH:
        return False
    if chapter in ("oneshot", "prefix") and "--num-blocks" in options and model != BUNDLED:
        return False
    return not (chapter == "speculation" and model != BUNDLED and "--draft" in options)


def read(case: Case, synthetic: Path) -> Result:
    """Read the chapter."""
    sessions: list[Session] = []

    def print_and_keep(console: Any, number: int, session: Session) -> int:
        sessions.append(session)
        return real(console, number, session)

    real, out, err = chapters.print_chapter, io.StringIO(), io.StringIO()
    began = _real_clock()
    with (
        mock.patch.object(chapters, "print_chapter", print_and_keep),
        busy_machine(case.busy),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(words_of(case, synthetic))
    wrong = [] if status == 0 else [f"exit status {status}: {err.getvalue().strip()[-200:]}"]
    held = unclaimed = 0
    if not sessions:
        return Result(status, tuple(wrong or ["the chapter was not opened"]))
    (session,) = sessions
    for block in (block for step in session.steps() for block in step):
        wrong += _wrong_in(block, session)
        if isinstance(block, Check):
            judged = session.judge(block.claims)
            held += sum(claim.holds is True for claim in judged)
            unclaimed += sum(claim.unclaimed for claim in judged)
    return Result(status, tuple(wrong), held, unclaimed, _real_clock() - began)


def words_of(case: Case, synthetic: Path) -> list[str]:
    words = [case.chapter, *shlex.split(case.options)]
    if case.model != BUNDLED:
        words += ["--model", HASH if case.model == HASH else str(synthetic)]
    return words


def _wrong_in(block: Block, session: Session) -> Iterator[str]:
    if isinstance(block, Check):
        for judged in session.judge(block.claims):
            said = session.fill(judged.claim.sentence)
            if judged.holds is False and block.certain:
                yield f"not so: {said}"
            elif judged.holds is None and not judged.unclaimed:
                yield f"not told: {said}"
            yield from _ill_formed(said)
            if judged.holds is False or judged.unclaimed:
                yield from _ill_formed(session.fill(judged.claim.unclaimed or judged.claim.otherwise))
    elif isinstance(block, Prose):
        yield from _missing(session.fill(block.text))
    elif isinstance(block, Recap):
        for line in block.lines:
            yield from _missing(session.fill(line))
    elif isinstance(block, Finding):
        text = session.finding(block)
        yield from ["a finding has no outcome"] if text is None else _ill_formed(text)
    elif isinstance(block, Predict):
        verdict = session.verdict(block)
        if verdict is None and not block.untold:
            yield f"no answer: {block.short_question}"
        yield from _missing(session.fill(block.question))
        for text in (explanation(block, session.measured), verdict or ""):
            yield from _ill_formed(text) if text else ()


FAULTS = {
    "a figure is missing": rf"(?<!\d){NOTHING}|\{{\{{|\bNone\b(?! of)|\bnan\b|\binf\b",
    "no sentence begins or ends so": r"^[a-z]|[^.?!:)`*]$",
    "a full stop too many": r"\.\.(?!\.)|[,;] ?\.| [,.;]",
    "singular and plural": r"(?<![\d.,])1 (?:tokens|rows|blocks|steps|requests|sequences|passes|forwards|times)\b",
    "a word twice": r"\b(\w+) \1\b",
}


def ill_formed(text: str) -> str | None:
    """What is wrong with a text as it is rendered, as far as a program can tell."""
    plain = " ".join(text.split())
    return next((fault for fault, pattern in FAULTS.items() if re.search(pattern, plain)), None)


def _ill_formed(text: str) -> Iterator[str]:
    if fault := ill_formed(text):
        yield f"{fault}: {' '.join(text.split())}"


def _missing(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.?!:])\s+", text):
        if re.search(FAULTS["a figure is missing"], sentence):
            yield f"a figure is missing: {' '.join(sentence.split())}"


_real_clock = time.perf_counter


class BusyClock:
    """`time.perf_counter` on a machine that other programs share: now and then a look at it finds that milliseconds
    have passed, sometimes many."""

    def __init__(self, seed: int):
        self._random, self._lost = random.Random(seed), 0.0

    def __call__(self) -> float:
        draw = self._random.random()
        if draw < 0.3:
            self._lost += self._random.expovariate(1 / (0.040 if draw < 0.01 else 0.0015))
        return _real_clock() + self._lost


@contextlib.contextmanager
def busy_machine(seed: int | None) -> Iterator[None]:
    """A context in which this process' clock is that of a busy machine; an idle one, whatever it is, without a seed."""
    load = OtherLoad(0.0 if seed is None or seed % 2 == 0 else 1.5, 2)
    clock = _real_clock if seed is None else BusyClock(seed)
    with mock.patch("forge.book.session.LoadMeter.read", lambda self: load), mock.patch("time.perf_counter", clock):
        yield


@contextlib.contextmanager
def short_measurements() -> Iterator[None]:
    """Measurements that take no longer than they must."""
    from forge.experiments import kernels

    smaller = {"SHAPE_LAYERS": 1, "ROUND_SECONDS": 0.0005, "LIMIT_SECONDS": 0.01, "ARRAY_BYTES": 1 << 22}
    with contextlib.ExitStack() as stack:
        for name, value in smaller.items():
            stack.enter_context(mock.patch.object(kernels, name, value))
        stack.enter_context(mock.patch("forge.cli.arrivals.TIMES", 1))
        stack.enter_context(mock.patch("forge.experiments.repeated_run.REPEATS", 1))
        stack.enter_context(mock.patch("forge.experiments.batching.TURNS", 1))
        stack.enter_context(mock.patch("forge.experiments.cluster.scale.REQUESTS", 800))
        yield


def print_table(chosen: Sequence[str]) -> int:
    """Read every case of the chosen chapters, or of all; returns how many have something wrong in them."""
    import tempfile

    bad = 0
    with tempfile.TemporaryDirectory() as folder, short_measurements():
        synthetic = write_small_qwen3(Path(folder) / "synthetic.gguf", max_position_embeddings=CONTEXT)
        for entry in entries():
            for case in cases(entry.command) if not chosen or entry.command in chosen else ():
                result = read(case, synthetic)
                bad += bool(result.wrong)
                mark = "✗" if result.wrong else "✓"
                claims = f"{result.held:>3} held {result.unclaimed:>3} not claimed {result.seconds:5.1f} s"
                print(f"{mark} {case!s:<100} {claims}", flush=True)
                for fault in result.wrong:
                    print(f"      {fault}", flush=True)
    print(f"{bad} readings with something wrong")
    return bad


if __name__ == "__main__":
    sys.exit(1 if print_table(sys.argv[1:]) else 0)
