"""A model of your own: one attention head over random embeddings, in NumPy."""

import numpy as np

from forge import LLM
from forge.cache.kv_storage import KvLayout, NumpyKvStorage
from forge.model.forward_batch import ForwardBatch
from forge.model.loader import LoadedModel
from forge.model.model import Model
from forge.testing import check_model
from forge.tokenizer.byte_tokenizer import ByteTokenizer


class OneHead(Model):
    vocab_size, num_layers, max_position_embeddings, head_dim = 259, 1, 4096, 32

    def __init__(self, seed: int = 0):
        self.embedding = np.random.default_rng(seed).standard_normal((259, self.head_dim), np.float32)

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        return KvLayout(1, num_blocks, block_size, num_kv_heads=1, head_dim=self.head_dim, kv_dtype=kv_dtype)

    def forward(self, batch: ForwardBatch, storage: NumpyKvStorage) -> np.ndarray:
        """Write every row's key and value, then let each row that is wanted attend to what its block table shows."""
        x, written = self.embedding[batch.token_ids], batch.slot_mapping >= 0
        storage.keys.reshape(-1, self.head_dim)[batch.slot_mapping[written]] = x[written]
        storage.values.reshape(-1, self.head_dim)[batch.slot_mapping[written]] = np.roll(x, 1, axis=1)[written]
        rows = [self._logits(batch, storage, row, x[row]) for row in batch.logit_rows]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def _logits(self, batch: ForwardBatch, storage: NumpyKvStorage, row: int, query: np.ndarray) -> np.ndarray:
        owner = np.searchsorted(batch.cu_seqlens, row, side="right") - 1
        keys, values = storage.gather(0, batch.block_tables[owner], int(batch.positions[row]) + 1)
        scores = np.exp(0.1 * (keys[:, 0] @ query))  # one row at a time: nothing beside it can be seen in its bits
        return self.embedding @ ((scores @ values[:, 0]) / scores.sum())


loaded = LoadedModel(name="one-head", model=OneHead(), tokenizer=ByteTokenizer())
check_model(loaded)  # neighbours, chunks, blocks, caches, preemption, drafts: not a bit may differ
print(LLM(loaded, kv="prefix").generate("Once upon a time")[0].outputs[0].token_ids)
