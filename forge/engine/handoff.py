"""What another engine has begun goes on here: with its keys and values, or with its tokens alone.

A hand-over is the keys and values of a prompt that one engine has computed. The other engine takes it in as it takes a
swapped sequence in: the blocks wait in its host pool until the sequence is admitted. Nothing of sampling, text or
grammars is handed over, because all of that follows from the tokens. So the last prompt token is computed again where
it is sampled, and the tokens are those of one engine to the last bit. (Zhong et al. 2024, DistServe; Patel et al. 2024,
Splitwise. vLLM's KV connectors compute the last token again too.)

A resumption needs tokens alone, because a sequence is its tokens. Draws belong to a seed and positions, keys and values
follow from tokens, and so do text, stop strings and grammars. So the tokens that were chosen elsewhere are appended to
the prompt's, and the sequence waits as a preempted one does; its prefill computes prompt and output together, as far as
no cache has them.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from forge.cache.block_pool import blocks_for
from forge.cache.host_pool import HostEntry
from forge.cache.kv_storage import KvLayout
from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Logprobs
from forge.errors import UsageError


@dataclass(frozen=True)
class KvHandoff:
    """The keys and values of a sequence's computed beginning, for another engine."""

    token_ids: tuple[int, ...]
    """Whose keys and values these are, from position 0 on."""
    layout: KvLayout
    """Of the storage that they come from. The sizes of the pools may differ, and nothing else."""
    data: Any
    """What `KvStorage.read_blocks` gave."""
    salt: str = ""

    @property
    def position(self) -> int:
        """The position at which another engine continues the sequence."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """The size of the blocks, as the storage holds them."""
        return sum(int(part.nbytes) for part in self.data)  # the parts of a tuple, or the rows of one array

    def check(self, layout: KvLayout, token_ids: Items[int], salt: str) -> None:
        """Raise `UsageError` unless this is the beginning of such a sequence in a storage of this layout."""
        if replace(self.layout, num_blocks=layout.num_blocks) != layout:
            raise UsageError(f"a hand-over of layout {self.layout} does not fit {layout}: give both engines one model")
        if tuple(token_ids[: self.position]) != self.token_ids or self.salt != salt:
            raise UsageError("a hand-over holds other tokens than the prompt begins with")


def hand_off(engine: Engine, seq_id: int) -> KvHandoff:
    """Copy the retained cache of an ended sequence for another engine. Raises `KeyError` if it is gone."""
    sequence = engine.scheduler.retained.sequences[seq_id]
    table, length = engine.cache.block_table(seq_id), engine.cache.computed_length(seq_id)
    tokens, data = tuple(sequence.token_ids[:length]), engine.storage.read_blocks(table)
    return KvHandoff(tokens, engine.storage.layout, data, sequence.salt)


def add_handed_over(
    engine: Engine,
    handoff: KvHandoff,
    request_id: str,
    prompt_token_ids: Items[int],
    params: SamplingParams,
    salt: str = "",
    **options: Any,
) -> tuple[int, ...]:
    """Queue a request whose beginning another engine has computed, as `Engine.add_request` with the same options.

    Without room for it in the host pool it is computed from the tokens. Raises `UsageError`, with nothing changed, for
    a hand-over that does not fit and for an engine that keeps no cache, too.
    """
    if not engine.cache.persistent:
        raise UsageError("a hand-over is continued in a KV cache: give this engine --kv basic, paged or prefix")
    handoff.check(engine.storage.layout, prompt_token_ids, salt)
    num_blocks = blocks_for(handoff.position, handoff.layout.block_size)
    computed = HostEntry(num_blocks, handoff.position, handoff.data)
    return engine.add_request(request_id, prompt_token_ids, params, salt=salt, computed=computed, **options)


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
        engine.append_emitted(request_id, emitted)
    return seq_ids
