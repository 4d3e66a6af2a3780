"""Resumption: a request that another engine began goes on here, with the very tokens that it would have had there.

A sequence is its tokens. Draws belong to a seed and positions, keys and values follow from tokens, and so do text,
stop strings and grammars. So the tokens that were chosen elsewhere are appended to the prompt's, and the sequence waits
as a preempted one does; its prefill computes prompt and output together, as far as no cache has them.
"""

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Logprobs
from forge.errors import UsageError


class Emitted(NamedTuple):
    """The known output tokens of one sample."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """One for each token, or none where the request asks for none."""


def add_resumed(
    engine: Engine,
    emitted: Items[Emitted],
    request_id: str,
    prompt_token_ids: Items[int],
    params: SamplingParams,
    **options: Any,
) -> tuple[int, ...]:
    """Queue a request that goes on after the tokens of `emitted`, one for each sample, with the options of
    `Engine.add_request`. The seed must be given. None of the samples may have ended: leave out the last token of one
    that has, and it is chosen again.

    Raises `UsageError`, with nothing changed, where that cannot be.
    """
    if params.seed is None or len(emitted) != params.n:
        raise UsageError("a request is resumed with its seed and with the tokens of each of its samples")
    longest = max(len(sample.token_ids) for sample in emitted)
    if longest >= params.max_tokens:
        raise UsageError(f"a sample of {longest} tokens has ended: max_tokens is {params.max_tokens}")
    seq_ids = engine.add_request(request_id, prompt_token_ids, params, **options)
    if longest:
        engine.append_emitted(request_id, [(sample.token_ids, sample.logprobs) for sample in emitted])
    return seq_ids
