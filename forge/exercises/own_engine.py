"""`forge build engine COMMAND …`: an ordinary command on an engine with all of the reader's passed parts at once.

The parts stand where the engine looks for its own: caches behind `--kv basic`, `paged` and `prefix`, the scheduler,
preemption, sampling, verification, the proposer behind `--speculate ngram`. Afterwards the same requests run on
forge's own engine, for equal tokens and for its speed.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.text import Text

from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.exercises.catalog import Entry
from forge.exercises.child import assembled
from forge.exercises.loading import limit_process, load
from forge.exercises.session import passed_entries
from forge.llm import LLM
from forge.trace.records import StepRecord
from forge.views.formatting import plural, rate
from forge.views.palette import TITLE
from forge.views.screen import draw, marked
from forge.views.terminal import open_console

COMMANDS = ("generate", "compare", "trace-scheduler", "serve")
ELSEWHERE = ("router", "grammar_mask")
"""Parts that stand before engines, or serve one request's form alone."""
_MEMORY_BYTES = 4 << 30
_MOST_COMPARED = 64
_PROBE = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def engine_entries(folder: Path) -> tuple[Entry, ...]:
    """List the passed exercises that an engine can be assembled from. Raises `UsageError` if there are none."""
    entries = tuple(entry for entry in passed_entries(folder) if entry.name not in ELSEWHERE)
    if not entries:
        raise UsageError(f"no exercise in {folder} has passed yet: forge build check NUMBER")
    return entries


def with_defaults(entries: Sequence[Entry], arguments: Sequence[str]) -> list[str]:
    """Add options that bring in as many of the parts as possible, except those that the command line has already."""
    names = {entry.name for entry in entries}
    command, *rest = arguments
    options = {argument.partition("=")[0] for argument in rest}
    kinds = {"prefix_index": "prefix", "paged_cache": "paged", "block_pool": "paged", "contiguous_cache": "basic"}
    kind = next((kind for name, kind in kinds.items() if name in names), "paged")
    added = ["--kv", kind]
    if "ngram_proposer" in names or "verification" in names:
        added += ["--speculate", "ngram" if "ngram_proposer" in names else "draft"]
    if "attention" in names and "--model" not in options and "-m" not in options:
        added += ["--device", "reference"]
    pairs = zip(added[::2], added[1::2], strict=True)
    return [command, *rest, *(word for pair in pairs if pair[0] not in options for word in pair)]


def title(entries: Sequence[Entry]) -> str:
    return "your engine: " + ", ".join(f"{entry.name.replace('_', ' ')} ({entry.number})" for entry in entries)


def all_parts(folder: Path) -> AbstractContextManager[dict[str, dict[str, int]]]:
    """Put all passed parts of a folder into every new engine, as `assembled` does."""
    return assembled({entry.name: load(folder / entry.file_name) for entry in engine_entries(folder)})


@dataclass
class Ran:
    """Requests and tokens of the engines of one `LLM`."""

    args: EngineArgs
    requests: list[tuple[tuple[int, ...], SamplingParams, tuple[int, ...]]] = field(default_factory=list)
    """Each request's prompt, its parameters with a seed, and the ids of its sequences."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Each sequence's output tokens, by sequence id."""
    ended: set[int] = field(default_factory=set)
    """The sequences that ended, and were not aborted."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds if self.seconds else 0.0


@contextmanager
def observed() -> Iterator[list[Ran]]:
    """Record what runs within this context, so that it can run again on forge's own engine."""
    runs: list[Ran] = []
    create, add_request, step = LLM.from_engine_args, Engine.add_request, Engine.step

    def from_engine_args(args: EngineArgs) -> LLM:
        runs.append(Ran(replace(args, on_load_progress=None, on_compile_progress=None)))
        return create(args)

    def add(self: Engine, request_id: str, token_ids: Sequence[int], params: SamplingParams, **named: Any) -> Any:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(32))
        seq_ids = add_request(self, request_id, token_ids, params, **named)
        if runs:
            runs[-1].requests.append((tuple(token_ids), params, tuple(seq_ids)))
        return seq_ids

    def one_step(self: Engine) -> StepRecord:
        record = step(self)
        if runs:
            runs[-1].seconds += record.ended - record.started
            for token in record.tokens:
                runs[-1].tokens.setdefault(token.seq_id, []).append(token.token_id)
            runs[-1].ended |= {finish.seq_id for finish in record.finished if finish.reason != "abort"}
        return record

    with (
        patch.object(LLM, "from_engine_args", from_engine_args),
        patch.object(Engine, "add_request", add),
        patch.object(Engine, "step", one_step),
    ):
        yield runs


def print_beside_own(ran: Ran) -> bool:
    """Run the same requests on forge's own engine and compare. Returns whether the tokens are identical."""
    requests = [request for request in ran.requests[-_MOST_COMPARED:] if request[1].structured is None]
    if not requests:
        return True
    llm = LLM.from_engine_args(ran.args)
    llm.generate("warm up", SamplingParams(max_tokens=2))
    engine, seconds, num_tokens, num_different = llm.engine, 0.0, 0, 0
    for number, (prompt, params, _) in enumerate(requests):
        engine.add_request(f"own-{number}", list(prompt), params)
    while engine.has_unfinished():
        record = engine.step()
        seconds += record.ended - record.started
    for number, (_, _, seq_ids) in enumerate(requests):
        for sample, seq_id in zip(engine.output(f"own-{number}").outputs, seq_ids, strict=False):
            yours, expected = ran.tokens.get(seq_id, []), list(sample.token_ids)
            num_tokens += len(expected)
            num_different += (expected if seq_id in ran.ended else expected[: len(yours)]) != yours
    many = plural(len(requests), "request")
    words = f"identical to forge's own: {num_tokens} tokens of {many}"
    if num_different:
        words = f"{num_different} of {many} differ from forge's own"
    speeds = f"yours {rate(ran.tokens_per_second)} tokens/s, forge's own {rate(num_tokens / seconds)}"
    draw(open_console(), [marked(not num_different, words), speeds])
    return not num_different


class Assembling(str):
    """A `--kv` value that assembles the reader's engine in the process that receives it, and is plain text there."""

    folder: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _assemble_for_good, (self.folder, str(self))


_for_good = ExitStack()
"""Contexts that stay open until the process ends."""


def _assemble_for_good(folder: str, kind: str) -> str:
    _for_good.enter_context(all_parts(Path(folder)))
    return kind


def _serve(folder: Path) -> Callable[..., int]:
    """Return `serving.serve` for the reader's engine, which runs in another process."""
    from forge.server import serving

    serve_forge = serving.serve

    def serve(model: str, options: dict[str, Any], *arguments: Any, **named: Any) -> int:
        args = EngineArgs(model, **options)
        with all_parts(folder), observed() as runs:
            LLM.from_engine_args(args).generate("Once upon a time", _PROBE)
        print_beside_own(runs[-1])
        kind = Assembling(args.cache)
        kind.folder = str(folder)
        return serve_forge(model, options | {"kv": kind}, *arguments, **named)

    return serve


def run_command(folder: Path, arguments: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run a command line on the reader's engine, then its requests on forge's own. Returns the exit status."""
    from forge.server import serving

    where = folder.resolve()
    entries = engine_entries(where)
    limit_process(memory_bytes=_MEMORY_BYTES)
    open_console().print(Text(title(entries), TITLE))
    if arguments[0] == "serve":
        with patch.object(serving, "serve", _serve(where)):
            return run(with_defaults(entries, arguments))
    with all_parts(where), observed() as runs:
        status = run(with_defaults(entries, arguments))
    if status or "--json" in arguments:
        return status
    return 0 if sum(not print_beside_own(ran) for ran in runs) == 0 else 1
