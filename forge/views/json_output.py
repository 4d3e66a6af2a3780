"""Runs as JSON objects, for programs. Names are those of the screens with their units; nothing here is rounded."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from statistics import median
from typing import Any

from forge.engine.outputs import CompletionOutput
from forge.engine.task import Logprobs
from forge.trace.explain import explain_undrafted
from forge.trace.records import StepRecord
from forge.trace.speculation_summary import draft_totals, undrafted_counts
from forge.views.history import TextStreams
from forge.views.summary import Forward, RunResult


def to_json(value: Any) -> str:
    """Write indented JSON, also of dataclasses. Numbers that JSON does not have (NaN, infinities) become null."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=os.fspath)


def as_object(value: Any, *properties: str, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return a dataclass as a JSON object: its fields but those in `without`, then the named properties."""
    return picked(value, *(field.name for field in fields(value) if field.name not in without), *properties)


def picked(value: Any, *names: str) -> dict[str, Any]:
    """Return an object of these fields and properties of `value`."""
    return {name: plain(getattr(value, name)) for name in names}


def plain(value: Any) -> Any:
    """Convert dataclasses to objects, tuples to lists, and numbers that JSON does not have to None, however deep."""
    if is_dataclass(value):
        return as_object(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def run_object(result: RunResult, token_text) -> dict[str, Any]:
    """Return one run. `token_text` turns a token id into its text, for alternatives that no record holds."""
    output = result.output
    first = output.outputs[0]
    return {
        **as_object(result.label),
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "seed": output.seed,
        **picked(first, "text", "token_ids", "finish_reason"),
        "finish": result.endings[0],
        "stop_reason": first.stop_reason,
        "time_to_first_token_ms": output.metrics.time_to_first_token_ms,
        "decode_tokens_per_second": result.decode_tokens_per_second,
        "per_forward_ms": result.spread and result.spread._asdict(),
        **picked(result, "tokens_computed", "kv_bytes_held"),
        "forwards": forward_objects(result.records),
        **speculation_object(result.records),
        "samples": [_sample_object(sample, result.endings[sample.index], token_text) for sample in output.outputs],
        "prompt_logprobs": _prompt_logprobs(output, token_text),
    }


CYCLE_NUMBERS = ("num_accepted", "num_emitted", "target_positions", "draft_positions")
"""Properties that a draft cycle's object has beside its fields."""


def speculation_object(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the draft tokens of a run by proposer, and how many decodes had none, by reason."""
    totals = draft_totals(record.cycles for record in records)
    return {
        "speculation": [as_object(total, "acceptance") for total in totals],
        "undrafted": undrafted_counts(records),
    }


def cycles_object(record: StepRecord) -> dict[str, Any]:
    """Return the draft tokens of a step by sequence and proposer, with the numbers accepted and emitted; and who had
    none."""
    return {
        "cycles": [as_object(cycle, *CYCLE_NUMBERS) for cycle in record.cycles],
        "undrafted": [
            {**undrafted._asdict(), "decision": plain(undrafted.decision), "why": explain_undrafted(undrafted)}
            for undrafted in record.undrafted
        ],
    }


ENDS = 5
"""Forwards at either end of a run whose median stands for it, so that one disturbed forward does not."""


def climb_object(forwards: Sequence[Forward]) -> dict[str, Any]:
    """Return what a forward cost at the beginning, after the prefill, and at the end. Nulls where there are too few."""
    later = forwards[1:]
    if len(later) < 2:
        return dict.fromkeys(("early_tokens", "early_ms", "late_tokens", "late_ms", "late_over_early"))
    early, late = later[:ENDS], later[-ENDS:]
    early_ms, late_ms = (median(forward.ms for forward in part) for part in (early, late))
    return {
        "early_tokens": median(forward.tokens for forward in early),
        "early_ms": early_ms,
        "late_tokens": median(forward.tokens for forward in late),
        "late_ms": late_ms,
        "late_over_early": late_ms / early_ms if early_ms else None,
    }


def forward_objects(records: tuple[StepRecord, ...]) -> list[dict[str, Any]]:
    """Return one object per forward: `token_id`, `text`, `probability` of the first sample, and `tokens` with every
    one's."""
    streams = TextStreams()
    objects = []
    for number, record in enumerate(records, start=1):
        streams.feed(record)
        tokens = [
            {"sample": streams.index_of(token.seq_id), **picked(token, "token_id", "text", "probability")}
            for token in record.tokens
        ]
        first = tokens[0] if tokens else {}
        objects.append(
            {
                "step": number,
                **picked(record, "phase", "tokens_computed"),
                "milliseconds": record.forward_ms,
                **{name: first.get(name) for name in ("token_id", "text", "probability")},
                "tokens": tokens,
                **cycles_object(record),
            }
        )
    return objects


def _sample_object(sample: CompletionOutput, ending: str, token_text) -> dict[str, Any]:
    logprobs = sample.logprobs
    return {
        **picked(sample, "index", "text", "token_ids", "finish_reason"),
        "finish": ending,
        "stop_reason": sample.stop_reason,
        "logprobs": None if logprobs is None else [_alternatives(entry or (), token_text) for entry in logprobs],
    }


def _prompt_logprobs(output, token_text) -> list[Any] | None:
    if output.prompt_logprobs is None:
        return None
    return [
        {
            "token_id": token_id,
            "text": token_text(token_id),
            "logprob": None if entry is None else dict(entry).get(token_id),
            "alternatives": None if entry is None else _alternatives(entry, token_text),
        }
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def _alternatives(entry: Logprobs, token_text) -> list[dict[str, Any]]:
    return [{"token_id": token_id, "text": token_text(token_id), "logprob": logprob} for token_id, logprob in entry]
