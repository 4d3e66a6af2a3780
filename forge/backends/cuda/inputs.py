"""A batch as the kernels read it: one run of int32 words, copied to the device in one go.

Everything that differs between two steps of the same shape is in these words: tokens, positions, slots, block tables,
which rows make a tile of attention. A captured graph reads them at fixed addresses, so the copy is all that a replay
needs. What decides the shape (numbers of rows, tiles and logit rows, splits) is `Shape`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from forge.backends.cuda.shapes import TOKEN_BUCKETS, Policy, next_power_of_2
from forge.backends.cuda.storage import HostBuffer
from forge.model.forward_batch import ForwardBatch

LEAST_WORDS = 1 << 16
"""Words of the buffer at least, so that it rarely moves. Guess."""
MOST_LOGIT_ROWS = 256
"""Logit rows, at most, of a step that graphs are captured for. A graph keeps its logits' memory, 600 KB a row.
Guess."""
PRUNING = 4
"""The last layer is computed for the logit rows alone where they are fewer than one row in this many. Guess."""


@dataclass(frozen=True)
class Shape:
    """Everything about a step that its kernels' launches depend on. Two steps of one shape can share a graph."""

    num_rows: int
    """Rows that are computed, padding included."""
    num_logit_rows: int
    is_decode: bool
    """One row per sequence, all of which need logits, and none of which needs another's key of this step."""
    tiles: int
    """Tiles of attention, padding included; a decode has one per row."""
    tile_rows: int
    """Rows of a tile."""
    splits: int
    last_splits: int
    """Splits of the last layer's attention, which runs for the logit rows alone."""
    is_bucket: bool
    """Whether it is one of the shapes that graphs are captured for."""
    in_float32: bool
    """Whether attention multiplies in float32."""

    @property
    def prunes(self) -> bool:
        """True if the last layer computes only the logit rows, after it has stored all keys and values."""
        return not self.is_decode and PRUNING * self.num_logit_rows <= self.num_rows

    @property
    def sections(self) -> dict[str, int]:
        """The number of words of each array before the block tables, in order: multiples of 4, so that each array is
        aligned to 16 bytes."""
        counts = {
            "table_stride": 1,
            "token_ids": self.num_rows,
            "positions": self.num_rows,
            "slots": self.num_rows,
            "tile_sequences": self.tiles,
            "tile_firsts": self.tiles,
            "tile_lengths": self.tiles,
            "logit_rows": self.num_logit_rows,
            "logit_sequences": self.num_logit_rows,
            "logit_lengths": self.num_logit_rows,
        }
        return {name: -(-count // 4) * 4 for name, count in counts.items()}


@dataclass(frozen=True)
class Inputs:
    """Views of the words on the device."""

    shape: Shape
    table_stride: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tile_sequences: torch.Tensor
    tile_firsts: torch.Tensor
    tile_lengths: torch.Tensor
    logit_rows: torch.Tensor
    logit_sequences: torch.Tensor
    logit_lengths: torch.Tensor
    tables: torch.Tensor
    """`[sequences, table_stride]` and whatever comes after."""


def shape_of(batch: ForwardBatch, policy: Policy, block_size: int, in_float32: bool) -> Shape:
    """Return the shape in which `batch` is computed. in_float32: attention multiplies in float32."""
    num_rows, num_sequences, num_logits = batch.num_rows, batch.num_sequences, len(batch.logit_rows)
    longest = int(batch.context_lens.max())
    is_decode = num_rows == num_sequences == num_logits and not _reads_what_others_write(batch, block_size)
    buckets = policy.row_buckets if is_decode else policy.token_buckets
    can_be_captured = policy.buckets and num_logits <= MOST_LOGIT_ROWS
    bucket = next((size for size in buckets if size >= num_rows and can_be_captured), None)
    rows = num_rows if bucket is None else bucket
    if is_decode:
        splits = policy.splits(rows, longest)
        return _decode_shape(policy, rows, splits, bucket is not None, in_float32)
    per_tile = policy.attention_tile(rows, in_float32).rows
    tiles = sum(-(-int(length) // per_tile) for length in np.diff(batch.cu_seqlens))
    if bucket is not None:
        num_logits = next_power_of_2(num_logits) if num_logits else 0
        tiles = -(-rows // per_tile) + next_power_of_2(num_sequences)
    splits = policy.splits(tiles, longest)
    last_splits = policy.splits(max(1, num_logits), longest)
    return Shape(rows, num_logits, False, tiles, per_tile, splits, last_splits, bucket is not None, in_float32)


def expected_shapes(policy: Policy, in_float32: bool, max_context: int) -> list[Shape]:
    """List shapes that together launch every kernel specialization that steps up to `max_context` are likely to need:
    each bucket, and one step of more rows, with every number of splits that their lengths may lead to."""
    shapes: dict[Shape, None] = {}
    for rows in policy.row_buckets:
        for splits in _up_to(policy.splits(rows, max_context)):
            shapes[_decode_shape(policy, rows, splits, True, in_float32)] = None
    for rows in (*policy.token_buckets, 2 * TOKEN_BUCKETS[-1]):
        per_tile = policy.attention_tile(rows, in_float32).rows
        tiles = -(-rows // per_tile) + 1
        most, most_last = policy.splits(tiles, max_context), policy.splits(1, max_context)
        for logit_rows in (1, min(rows, 64)):
            for splits in _up_to(max(most, most_last)):
                splits, last = min(splits, most), min(splits, most_last)
                shapes[Shape(rows, logit_rows, False, tiles, per_tile, splits, last, True, in_float32)] = None
    return list(shapes)


def _decode_shape(policy: Policy, rows: int, splits: int, is_bucket: bool, in_float32: bool) -> Shape:
    tile_rows = policy.one_row_tile(in_float32).rows
    return Shape(rows, rows, True, rows, tile_rows, splits, splits, is_bucket, in_float32)


def _up_to(largest: int) -> list[int]:
    """Return the powers of two up to `largest`, itself a power of two."""
    return [1 << exponent for exponent in range(largest.bit_length())]


class InputBuffer:
    """The words on the host and on the device. Steps fill it one after the other; it moves when it grows.

    There are two here, which take turns: the words of a step may still wait to be copied when those of the next are
    written. On the device there is one; its copy waits for the step before, as all that a stream is given does.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._words = self._fills = 0
        self._hosts: list[HostBuffer] = []
        self._on_device = torch.zeros(0, dtype=torch.int32)

    def reach(self, shape: Shape, table_words: int) -> bool:
        """Make room for that shape and so many words of block tables. Returns whether the buffer moved, which
        invalidates every graph."""
        needed = _word_spans(shape)[1] + table_words
        if needed <= self._words:
            return False
        self._words = max(LEAST_WORDS, next_power_of_2(needed))
        self._hosts = [HostBuffer((self._words,), self._device) for _ in range(2)]
        self._on_device = torch.zeros(self._words, dtype=torch.int32, device=self._device)
        return True

    def fill(self, shape: Shape, batch: ForwardBatch) -> None:
        """Write the batch's words and start their copy to the device. The step before may still be running."""
        host = self._hosts[self._fills % 2]
        self._fills += 1
        host.wait()  # until its previous contents have been copied
        words = host.numbers
        spans, used = _word_spans(shape)
        words[:used] = 0
        words[0] = batch.block_tables.shape[1]
        words[spans["slots"]] = -1
        for name, values in _arrays(shape, batch).items():
            words[spans[name]][: len(values)] = values
        tables = batch.block_tables.reshape(-1)
        end = used + tables.size  # rows that are padding have no keys, so they need no table
        words[used:end] = tables
        host.copy(self._on_device[:end], host.tensor[:end])

    def inputs(self, shape: Shape) -> Inputs:
        """Return views of the device's words for that shape."""
        spans, used = _word_spans(shape)
        views = {name: self._on_device[span] for name, span in spans.items()}
        return Inputs(shape, tables=self._on_device[used:], **views)


def _arrays(shape: Shape, batch: ForwardBatch) -> dict[str, np.ndarray]:
    """Return the contents of `Shape.sections`, without padding. Where there are none the words stay 0."""
    logit_rows = batch.logit_rows
    one_each = np.ones_like(logit_rows)
    arrays = {"token_ids": batch.token_ids, "positions": batch.positions, "slots": batch.slot_mapping}
    if shape.is_decode:  # its rows are its logit rows, so those are not asked for
        return arrays | {"tile_sequences": logit_rows, "tile_firsts": logit_rows, "tile_lengths": one_each}
    lengths = np.diff(batch.cu_seqlens)
    per_sequence = -(-lengths // shape.tile_rows)
    sequences = np.repeat(np.arange(batch.num_sequences), per_sequence)
    before = np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    offsets = (np.arange(len(sequences)) - before) * shape.tile_rows  # within the sequence's own rows
    return arrays | {
        "tile_sequences": sequences,
        "tile_firsts": batch.cu_seqlens[sequences] + offsets,
        "tile_lengths": np.minimum(lengths[sequences] - offsets, shape.tile_rows),
        "logit_rows": logit_rows,
        "logit_sequences": np.searchsorted(batch.cu_seqlens, logit_rows, side="right") - 1,
        "logit_lengths": one_each,
    }


def _reads_what_others_write(batch: ForwardBatch, block_size: int) -> bool:
    """True if a block that one sequence writes is also in another's table.

    Then keys must all be stored before anyone attends, which a decode's one kernel does not wait for.
    """
    if batch.num_sequences == 1:
        return False
    tables = batch.block_tables
    written = batch.slot_mapping // block_size  # -1 stays -1
    is_written = np.zeros(max(int(tables.max()), int(written.max())) + 2, bool)
    is_written[written] = True
    is_written[-1] = False  # what -1 means: no block
    return int(is_written[tables].sum()) > int(is_written.sum())


@lru_cache(4096)
def _word_spans(shape: Shape) -> tuple[dict[str, slice], int]:
    """Return the span of each array's words, and where the block tables begin."""
    spans, start = {}, 0
    for name, words in shape.sections.items():
        spans[name] = slice(start, start + words)
        start += words
    return spans, start
