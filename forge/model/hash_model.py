"""A model without weights: a hash of the tokens so far decides what comes next. For exercising everything but a model.

Its logits are a pure function of the context, with equal bits in every instance, process and batch, and cost next to
nothing. So thousands of requests can be scheduled in a second, and whatever scheduling, caching or preemption does to a
sequence must leave its tokens as they were.

It needs its cache as a real model does. A row's key is its token. Its value is a state: the sum of one pseudo-random
number per (position, token) from the first position to its own (Zobrist hashing, 1970), taken from the keys that lie in
the cache. A row's logits follow from the states of all positions up to its own, read through the block table. So a
wrong block, a wrong slot or a copy that was forgotten shows in the logits; and a block with the right tokens behind
other ones shows as well, because a state, like a real key, depends on all that precedes it.

It says lower-case letters and spaces, so that a person can look at it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage, NumpyKvStorage
from forge.errors import UsageError
from forge.model.catalog import HASH_MODEL
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Model
from forge.tokenizer.byte_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE

SAID = tuple(b"abcdefghijklmnopqrstuvwxyz ")
EOS_PROBABILITY = 1 / 64

_SPREAD = 8.0
"""Logits of what it may say lie between 0 and this."""
_UNSAID = np.float32(-16)
"""The offset of all other tokens' logits."""
_CERTAIN = np.float32(32)
_STRIDE = np.uint32(0x9E3779B1)
"""2^32 over the golden ratio: what tells positions apart."""
_STATES, _LOGITS, _ENDS, _AGREES = (np.uint32(number) for number in (0x1B873593, 0xCC9E2D51, 0x52DCE729, 0x38495AB5))
"""Any numbers: what is hashed for one purpose must have nothing to do with what is hashed for another."""


def create_hash_model(name: str) -> "HashModel":
    """Create the model called `hash`, or `hash:AGREEMENT`. Raises `UsageError` for an agreement that is no share."""
    _, colon, agreement = name.partition(":")
    if not colon:
        return HashModel()
    try:
        share = float(agreement)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{name}: what follows {HASH_MODEL}: is how often it agrees, a number between 0 and 1")
    return HashModel(agreement=share)


class HashModel(Model):
    """A model over a storage of one layer whose keys and values are 32 bits each."""

    num_layers = 1
    max_position_embeddings = 1 << 17

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        *,
        emitted: Sequence[int] = SAID,
        eos_token_id: int = EOS_TOKEN_ID,
        eos_probability: float = EOS_PROBABILITY,
        agreement: float = 1.0,
        runs_ahead: bool = False,
    ):
        """emitted: the token ids that it says, nearly always. eos_probability: the share of contexts that it ends
        after; after all others it never does. agreement: below 1 a draft, whose argmax is that of the model with
        agreement 1 in this share of all contexts, and another one in the rest. runs_ahead: whether it remembers what
        was the argmax in the forward before, as a device does; it does not compute any later for that."""
        self.vocab_size = vocab_size
        self._eos_token_id, self._eos_probability, self._agreement = eos_token_id, eos_probability, agreement
        self.runs_ahead = runs_ahead
        self._argmax: WeakKeyDictionary[NumpyKvStorage, np.ndarray] = WeakKeyDictionary()
        """The argmax of each row of the last forward on a storage, if the model runs ahead."""
        self._bias = np.full(vocab_size, _UNSAID)
        self._bias[list(emitted)] = 0
        self._token_hashes = _mixed(np.arange(vocab_size, dtype=np.uint32) * _STRIDE ^ _LOGITS)

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        """Return the layout of a storage that fits this model and rounds nothing."""
        return KvLayout(self.num_layers, num_blocks, block_size, num_kv_heads=1, head_dim=1)

    def forward(self, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
        """Write keys and values of every row, read those of every context back; logits float32 `[R, vocab_size]`."""
        assert isinstance(storage, NumpyKvStorage)
        size = storage.layout.block_size
        keys, values = (array[0].reshape(-1, size).view(np.uint32) for array in (storage.keys, storage.values))
        tables = batch.block_tables[:, : -(-int(batch.context_lens.max()) // size)]
        places = np.arange(tables.shape[1] * size, dtype=np.uint32) * _STRIDE  # of each position
        owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))  # of each row
        slots: np.ndarray = batch.slot_mapping
        written: slice | np.ndarray = slice(None)
        if slots.min() < 0:
            written = slots >= 0
            slots = slots[written]

        token_ids = batch.token_ids
        if token_ids.min() < 0:
            token_ids = np.where(token_ids < 0, self._argmax[storage][np.maximum(-1 - token_ids, 0)], token_ids)
        keys.reshape(-1)[slots] = token_ids[written]
        tokens = keys[tables].reshape(len(tables), -1)  # [S, positions]
        states = np.cumsum(_mixed(tokens + places), axis=1, dtype=np.uint32)
        values.reshape(-1)[slots] = states[owners, batch.positions][written]
        states = values[tables].reshape(len(tables), -1)
        contexts = np.cumsum(_mixed(states + places ^ _STATES), axis=1, dtype=np.uint32)

        rows = batch.logit_rows
        logits = self._logits(_mixed(contexts[owners[rows], batch.positions[rows]]))
        if self.runs_ahead:
            self._argmax[storage] = logits.argmax(axis=1)
        return logits

    def _logits(self, contexts: np.ndarray) -> np.ndarray:
        """Compute logits from the hash of each context, uint32 `[R]`."""
        hashes = _mixed(contexts[:, None] ^ self._token_hashes)
        logits = (hashes >> np.uint32(8)).astype(np.float32)  # 24 bits, which float32 holds exactly
        logits *= np.float32(_SPREAD / 2**24)
        logits += self._bias
        ends = _share(contexts ^ _ENDS) < self._eos_probability
        logits[:, self._eos_token_id] = np.where(ends, _CERTAIN, -_CERTAIN)
        if self._agreement < 1:
            differs = _share(contexts ^ _AGREES) >= self._agreement
            logits[differs] = np.roll(logits[differs], 1, axis=1)
        return logits


def _mixed(words: np.ndarray) -> np.ndarray:
    """Mix uint32 words so that each bit hangs on every bit of its word (the finalizer of MurmurHash3). Overwrites
    `words`."""
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)
    return words


def _share(words: np.ndarray) -> np.ndarray:
    """Turn each word into a number in [0, 1)."""
    return _mixed(words) * 2.0**-32
