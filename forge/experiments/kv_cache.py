"""2. Prefill and decode are different work: keep keys and values.

[dim]forge kv-cache --only run "Once upon a time" 32[/dim]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from forge.cache.kv_storage import KV_ITEM_BYTES, vector_bytes
from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import OutputArgs
from forge.cli.run_control import StepSubscriber, exit_status
from forge.engine_args import EngineArgs
from forge.experiments.repeated_run import RepeatedRun
from forge.trace.records import StepRecord
from forge.views.chapter_run import run_parts
from forge.views.formatting import count, ms, plural, size
from forge.views.json_output import as_object, climb_object, run_object
from forge.views.screen import Part, Report, leads_on, report, title
from forge.views.summary import Forward, RunResult

MAX_TOKENS = 128
"""Tokens to generate: as many as in chapter 1, with which this run is compared."""
QUESTION = "What does a token cost once keys and values are kept?"
LEADS_ON = "The same tokens at another cost. Both in one picture:\n  forge compare --kv off vs basic"


@experiment()
def kv_cache(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    *,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="basic")],
    output: Annotated[OutputArgs, Takes("trace step")],
) -> Experiment:
    subscriber = StepSubscriber(output.trace, output.step)
    return Experiment(lambda: _measure(options.read_prompt(prompt), max_tokens, engine, subscriber), subscriber.is_on)


def _measure(prompt: str, max_tokens: int, engine: EngineArgs, subscriber: StepSubscriber) -> Report:
    run = RepeatedRun.of(engine, prompt, max_tokens, subscriber)
    layout, result = run.llm.kv_layout, run.result
    item_bytes = KV_ITEM_BYTES[layout.kv_dtype]
    scale_bytes = vector_bytes(layout.head_dim, layout.kv_dtype) - layout.head_dim * item_bytes
    shape = KvShape(layout.num_layers, layout.num_kv_heads, layout.head_dim, item_bytes, scale_bytes)
    facts = kv_cache_object(result, shape, run.llm.tokenizer.token_text) | {"runs": run.runs}
    return report(facts, lambda: screen(result, shape, prompt), exit_status(result))


@dataclass(frozen=True)
class KvShape:
    """What one token adds to the cache: a key and a value of `head_dim` numbers per layer and KV head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_number: int
    scale_bytes: int = 0
    """Bytes of the scale that all numbers of a key or value share; 0 where there is none."""

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.bytes_per_number + self.scale_bytes)

    def formula(self) -> str:
        numbers = f"{plural(self.head_dim, 'number')} x {plural(self.bytes_per_number, 'byte')}"
        if self.scale_bytes:
            numbers = f"({numbers} + {plural(self.scale_bytes, 'byte')} of scale)"
        return (
            f"2 (key and value) x {plural(self.num_layers, 'layer')} x {plural(self.num_kv_heads, 'KV head')} x "
            f"{numbers} = {size(self.bytes_per_token)} per token"
        )


def kv_cache_object(result: RunResult, shape: KvShape, token_text) -> dict[str, Any]:
    """Return the experiment as facts: the run, the cost of its forwards, the bytes held for them."""
    forwards = result.forwards
    return run_object(result, token_text) | {
        "num_forwards": len(forwards),
        "prompt_tokens": len(result.output.prompt_token_ids),
        "prefill_ms": forwards[0].ms if forwards else None,
        "tokens_without_cache": tokens_without_cache(forwards),
        **climb_object(forwards),
        **as_object(shape, "bytes_per_token"),
        "slots_reserved": max((r.cache.used_blocks * r.cache.block_size for r in result.records), default=0),
        "held_bytes": held_bytes(result.records[-1], shape) if result.records else 0,
    }


def screen(result: RunResult, shape: KvShape, prompt: str) -> Iterator[Part]:
    """Draw the whole experiment: the text, the flat chart with the bytes held, their arithmetic."""

    def note(forward: Forward) -> str:
        return f"holds {size(held_bytes(result.records[forward.number - 1], shape))}"

    lines = cache_sentences(result, shape)
    yield from (title(QUESTION), None, *run_parts(result, prompt, lines, shape.formula(), note=note))
    yield leads_on(LEADS_ON)


def held_bytes(record: StepRecord, shape: KvShape) -> int:
    """Return the bytes that the step's sequences hold after its rows are written, before a finished one frees them."""
    return sum(item.start + item.num_tokens for item in record.items) * shape.bytes_per_token


def cache_sentences(result: RunResult, shape: KvShape) -> list[str]:
    """Say in sentences what the chart shows in this run."""
    forwards = result.forwards
    if len(forwards) < 3:
        return ["Too few forwards to see a shape: ask for more tokens."]
    first, second, last = forwards[0], forwards[1], forwards[-1]
    return [
        f"The prefill computed the {plural(first.tokens, 'prompt token')} once; every forward after it computed "
        f"{plural(second.tokens, 'token')}. Forward {second.number} took {ms(second.ms)} ms, forward {last.number} "
        f"{ms(last.ms)} ms.",
        f"{count(result.tokens_computed)} tokens went through the model; without the cache it would have been "
        f"{count(tokens_without_cache(forwards))}. The price is memory: "
        f"{size(held_bytes(result.records[-1], shape))} held at the end, {size(shape.bytes_per_token)} more with every "
        "token.",
    ]


def tokens_without_cache(forwards: Sequence[Forward]) -> int:
    """Count the tokens that the same forwards would have computed had each begun at the first token."""
    return sum(forwards[0].tokens + index for index in range(len(forwards)))
