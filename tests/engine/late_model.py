"""A model that keeps its promises about logits to the letter, and no more: they can be read until the second forward
after theirs begins, and only by asking for rows or for the token of each."""

from collections.abc import Sequence

import numpy as np

from forge.cache.kv_storage import NumpyKvStorage
from forge.engine.sampling import choose_token
from forge.model.forward_batch import ForwardBatch
from forge.model.hash_model import HashModel
from forge.model.model import Draw


class LateLogits:
    """`DeviceLogits` over an array that is wiped when it may be."""

    def __init__(self, rows: np.ndarray, tokens: np.ndarray):
        """tokens: of each row, for the next step; `sample` writes there."""
        self._rows: np.ndarray | None = rows
        self._tokens, self._is_read = tokens, False
        self._are_wanted, self.sampled = True, False
        self.shape = rows.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> np.ndarray:
        assert self._rows is not None, "these logits have been overwritten"
        assert self._are_wanted, "these logits were let go"
        return self._rows[rows].copy()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:]

    def argmax_rows(self) -> tuple[list[int], list[float]]:
        assert self._rows is not None, "these logits have been overwritten"
        self._is_read, greatest = True, self._rows.max(axis=1)
        if not self.sampled:
            return self._rows.argmax(axis=1).tolist(), greatest.tolist()
        chosen = self._rows[np.arange(len(self)), self._tokens]
        return self._tokens.tolist(), np.where(np.isfinite(greatest), chosen, greatest).tolist()

    def sample(self, draws: Sequence[Draw]) -> None:
        """The engine's own choice. A row that is not finite gets any token."""
        assert self._rows is not None and self._are_wanted and not self._is_read and not self.sampled
        self.sampled = True
        for row, draw in enumerate(draws):
            if np.isfinite(self._rows[row].max()):
                self._tokens[row] = choose_token(self._rows[row], draw)

    def release(self) -> None:
        self._are_wanted = False

    def overwrite(self) -> None:
        self._rows = None


class LateModel(HashModel):
    """`HashModel` that runs ahead."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._given: list[LateLogits] = []

    def forward(self, batch: ForwardBatch, storage: NumpyKvStorage) -> LateLogits:
        for old in self._given[:-1]:
            old.overwrite()
        rows = super().forward(batch, storage)
        self._argmax[storage] = tokens = rows.argmax(axis=1)
        logits = LateLogits(rows, tokens)
        self._given = [*self._given[-1:], logits]
        return logits
