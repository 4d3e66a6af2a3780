"""An engine around a model that says what a test wants it to say.

A token is a piece of text; the model follows a script: a function of the tokens so far, or the list of tokens to say.
It reads what came before from the KV storage, as a real model does: a wrong block table or a forgotten token is seen.
"""

from collections.abc import Callable, Sequence

import numpy as np

from forge.cache.factory import CacheSize, create_kv_cache
from forge.cache.kv_storage import KvLayout, NumpyKvStorage
from forge.engine.async_scheduling import AsyncEngine
from forge.engine.engine import Engine
from forge.engine.outputs import CompletionOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.speculation import Speculation
from forge.model.model import Model
from forge.trace.records import StepRecord

Script = Callable[[list[int]], int | np.ndarray]
"""From all tokens so far to the next one, or to the logits."""

EOS = 0
PIECES = ("<eos>", *"abcdefghijklmnopqrstuvwxyz ")
"""Token ids 1 to 26 are the letters, 27 is a space."""


class PieceTokenizer:
    """What the engine needs of a tokenizer, over a list of pieces (text, or bytes that may be half a character)."""

    def __init__(self, pieces: Sequence[str | bytes] = PIECES):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.eos_token_ids, self.vocab_size = frozenset({EOS}), len(pieces)
        self.shown_bytes = [b"" if token_id == EOS else piece for token_id, piece in enumerate(self.pieces)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_hidden(self, token_id: int) -> bool:
        return token_id == EOS


class ScriptedModel(Model):
    """`Model` that follows a script. A row's key is its token; the script is asked with what lies in the storage."""

    num_layers = 1
    max_position_embeddings = 1 << 20

    def __init__(self, script: Script, vocab_size: int):
        self.script, self.vocab_size = script, vocab_size
        self.forwards: list[list[int]] = []
        """The number of rows of each sequence in each forward."""

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str) -> KvLayout:
        return KvLayout(1, num_blocks, block_size, 1, 1, kv_dtype)

    def new_storage(self, layout: KvLayout) -> NumpyKvStorage:
        return NumpyKvStorage(layout)

    def temporary_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        return num_rows + num_logit_rows

    def forward(self, batch, storage) -> np.ndarray:
        slots = storage.keys[0].reshape(-1)
        slots[batch.slot_mapping] = batch.token_ids
        logits = np.zeros((len(batch.logit_rows), self.vocab_size), np.float32)
        self.forwards.append(np.diff(batch.cu_seqlens).tolist())
        for out, row in zip(logits, batch.logit_rows, strict=True):
            sequence = int(np.searchsorted(batch.cu_seqlens, row, side="right")) - 1
            keys, _ = storage.gather(0, batch.block_tables[sequence], int(batch.positions[row]) + 1)
            said = self.script(keys[:, 0, 0].astype(int).tolist())
            if isinstance(said, np.ndarray):
                out[:] = said
            else:
                out[said] = 20.0
        return logits


def saying(token_ids: Sequence[int], prompt_length: int) -> Script:
    """The script that says `token_ids` after a prompt of that length, and EOS from then on."""
    return lambda tokens: [*token_ids, *[EOS] * 99][len(tokens) - prompt_length]


def muddled(tokens: list[int]) -> np.ndarray:
    """A script that hangs on every token so far, and on their order."""
    rng = np.random.default_rng([*tokens, len(tokens)])
    return (2 * rng.standard_normal(len(PIECES))).astype(np.float32)


def new_engine(
    script: Script,
    *,
    pieces: Sequence[str | bytes] = PIECES,
    kv: str = "basic",
    max_model_len: int = 32,
    max_num_seqs: int = 4,
    num_blocks: int | None = None,
    block_size: int = 4,
    speculation: Speculation | None = None,
    **scheduling,
) -> Engine:
    size = CacheSize(max_model_len, max_num_seqs, block_size, 8, num_blocks)
    cache = create_kv_cache(kv, size)
    storage_blocks = cache.num_blocks
    storage = NumpyKvStorage(KvLayout(1, storage_blocks + 64, block_size, 1, 1))
    storage.keys[:] = -1
    model = ScriptedModel(script, len(pieces))
    scratch = range(storage_blocks, storage_blocks + 64)
    config = SchedulerConfig(max_num_seqs, **scheduling)
    create = AsyncEngine if model.runs_ahead else Engine
    return create(model, PieceTokenizer(pieces), cache, storage, max_model_len, config, scratch, speculation)


def letters(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text]


def run_all(engine: Engine) -> list[StepRecord]:
    """Step to the end, invariants checked after every step."""
    records = []
    while engine.has_unfinished():
        records.append(engine.step())
        engine.scheduler.check_invariants()
    return records


def complete(engine: Engine, prompt: str | Sequence[int], **params) -> CompletionOutput:
    """Run one request alone; return its first sample."""
    token_ids = letters(prompt) if isinstance(prompt, str) else list(prompt)
    engine.add_request("only", token_ids, SamplingParams(**params))
    run_all(engine)
    output = engine.output("only").outputs[0]
    engine.forget("only")
    assert_nothing_held(engine)
    return output


def assert_nothing_held(engine: Engine) -> None:
    """Nothing is left of the requests that ran."""
    engine.scheduler.check_invariants()
    stats = engine.cache.stats()
    assert (stats.used_blocks, stats.tokens_held) == (0, 0)
    assert not engine.has_unfinished()
    assert not engine.scheduler.retained.sequences
    assert engine._requests == {}
    assert engine._batch_builder._tables == {}
    assert engine.timeline.requests() == ()
