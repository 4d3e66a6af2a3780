"""Runs made by hand, for views to draw: no engine, no model, no clock."""

import io
from dataclasses import replace

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.trace.records import CacheRecord, FinishRecord, ItemRecord, RequestMetrics, StepRecord, TokenRecord
from forge.views.summary import RunLabel, RunResult
from forge.views.terminal import ForgeConsole, open_console

LABEL = RunLabel("tales-q8_0", "basic", "cpu", "NumPy float32, one row at a time")
WORDS = (" there", " was", " a", " small", " fox", " who", " lived", " by", " the", " old", " mill", ".")
BYTES_PER_TOKEN = 1000


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def piped(width: int = 80) -> ForgeConsole:
    return open_console(io.StringIO(), width=width)


def terminal(width: int = 80, height: int = 24, **environment: str) -> ForgeConsole:
    """A console on a colour terminal; `environment` adds variables such as NO_COLOR."""
    return ForgeConsole(
        file=Terminal(),
        width=width,
        height=height,
        _environ={"TERM": "xterm-256color", "COLORTERM": "truecolor", **environment},
    )


def written(console: ForgeConsole) -> str:
    return console.file.getvalue()


def step(
    number: int,
    tokens: int,
    ms: float,
    text: str = " word",
    *,
    samples: int = 1,
    finish: str | None = None,
    held: int = 0,
    start: int = 0,
) -> StepRecord:
    """One step in which every one of `samples` sequences computes `tokens` rows and says `text`."""
    phase = "prefill" if number == 1 else "decode"
    return StepRecord(
        step=number,
        items=tuple(ItemRecord(7 + sample, phase, start, tokens) for sample in range(samples)),
        tokens=tuple(TokenRecord(7 + sample, 4 + number, 100 + number, text, 0.5) for sample in range(samples)),
        finished=tuple(FinishRecord(7 + sample, finish) for sample in range(samples)) if finish else (),
        cache=CacheRecord("basic", 16, 64, 1, held, held * BYTES_PER_TOKEN, 0),
        schedule_ms=0.0,
        forward_ms=ms,
        sample_ms=0.0,
        started=number * 1.0,
        ended=number + ms / 1e3,
    )


def run_of(
    forwards: list[tuple[int, float]],
    *,
    texts: tuple[str, ...] = WORDS,
    finish: str = "length",
    samples: int = 1,
    label: RunLabel = LABEL,
    token_ids: tuple[int, ...] | None = None,
) -> RunResult:
    """A run from (tokens computed, milliseconds) of each forward."""
    records = tuple(
        step(
            number,
            tokens,
            ms,
            texts[(number - 1) % len(texts)],
            samples=samples,
            finish=finish if number == len(forwards) else None,
            held=3 + number,
            start=3 + number - tokens,
        )
        for number, (tokens, ms) in enumerate(forwards, start=1)
    )
    text = "".join(record.tokens[0].text for record in records)
    ids = token_ids if token_ids is not None else tuple(record.tokens[0].token_id for record in records)
    metrics = RequestMetrics(4, len(ids), 1.0, 1.0021 if ids else None, 2.0 if ids else None)
    outputs = tuple(CompletionOutput(index, text, ids, finish, None, None, metrics) for index in range(samples))
    return RunResult(label, records, (RequestOutput("request-0", "Once upon", (1, 2, 3, 4), outputs, None, 7),))


def climbing(count: int = 32) -> RunResult:
    """No cache: every forward computes one token more, and takes longer."""
    return run_of([(4 + index, 1.0 + 0.5 * index) for index in range(count)], label=replace(LABEL, kv="off"))


def flat(count: int = 32) -> RunResult:
    """A cache: a prefill, then one token each."""
    return run_of([(4, 1.9), *[(1, 0.6)] * (count - 1)])
