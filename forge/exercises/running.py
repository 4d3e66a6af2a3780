"""`forge build run`: the real engine and the bundled model on the reader's code, beside the engine's own part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.exercises.catalog import Entry
from forge.exercises.exercise import Endless, Exercise, Mistake, Trial
from forge.exercises.loading import line_in, load
from forge.llm import LLM
from forge.trace.records import StepRecord


@dataclass(frozen=True)
class Ran:
    """One run of the engine."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[StepRecord, ...]
    token_text: Callable[[int], str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(record.ended - record.started for record in self.records)
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def fullest(self) -> StepRecord:
        """The step with most blocks in use."""
        return max(self.records, key=lambda record: (record.cache.used_blocks, record.cache.tokens_held))


@dataclass(frozen=True)
class Comparison:
    """The same requests with the reader's part and with the engine's own."""

    exercise: Exercise
    yours: Ran
    own: Ran

    @property
    def identical(self) -> bool:
        return self.yours.token_ids == self.own.token_ids


class BrokenRun(ForgeError):
    """The engine stopped on the reader's code."""


def run(entry: Entry, path: Path, model: str | None = None) -> Comparison:
    """Raises `BrokenRun`, with the reader's line, if the reader's code raises something."""
    exercise = entry.exercise()
    own = _run(exercise, exercise.own, model)
    try:
        piece = load(path)
        with exercise.engine(piece) as options:
            yours = _run(exercise, options, model)
    except (Exception, Endless) as error:
        raise _broken(entry, path, error) from None
    return Comparison(exercise, yours, own)


def _broken(entry: Entry, path: Path, error: BaseException) -> BaseException:
    where = line_in(str(path.resolve()), error)
    if where is None and not isinstance(error, AssertionError | Mistake):
        return error
    piece = ModuleType("piece")
    piece.__file__ = str(path.resolve())
    found = Trial(piece).mistake_of(error).found if where else str(error)
    at = f" ({where})" if where else ""
    return BrokenRun(f"the engine stopped on your code: {found}{at}. forge build check {entry.number} says more")


def _run(exercise: Exercise, options: Mapping[str, Any], model: str | None) -> Ran:
    prepare, drive = options.get("prepare"), options.get("drive", _drive)
    options = {name: options[name] for name in options if name not in ("prepare", "drive")}
    llm = LLM(model or "tales", **options)
    if prepare is not None:
        prepare(llm)
    params = SamplingParams(**exercise.params)
    llm.generate("warm up", SamplingParams(max_tokens=2))
    llm.engine.scheduler.keep_block_map = exercise.view == "blocks"
    outputs, records = drive(llm, exercise.prompts, params)
    samples = [sample for output in outputs for sample in output.outputs]
    return Ran(
        tuple(sample.text for sample in samples),
        tuple(tuple(sample.token_ids) for sample in samples),
        tuple(records),
        lambda token_id: llm.tokenizer.decode([token_id]),
    )


def _drive(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> tuple[list[RequestOutput], list[StepRecord]]:
    started = llm.start(list(prompts), params)
    records = list(started)
    return started.outputs, records


def facts(comparison: Comparison) -> dict[str, Any]:
    return {
        "identical": comparison.identical,
        "texts": list(comparison.yours.texts),
        "tokens_per_second": comparison.yours.tokens_per_second,
        "tokens_per_second_own": comparison.own.tokens_per_second,
        "steps": len(comparison.yours.records),
        "steps_own": len(comparison.own.records),
    }
