"""What caches have in common that know of each sequence a table: its blocks, and how many slots of them are in use."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Generic, Protocol, TypeVar

from forge.cache.kv_cache import KvCache, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import TableRecord


class HasSlots(Protocol):
    """A table: blocks, how many of their slots are reserved, and how many of these are computed."""

    reserved: int
    computed: int

    @property
    def blocks(self) -> Sequence[int]: ...


Table = TypeVar("Table", bound=HasSlots)


class TableCache(KvCache, Generic[Table]):
    """A cache with a table for each sequence and each snapshot. A kind says what copying and dropping a table takes."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._tables: dict[int, Table] = {}
        self._snapshots: dict[int, Table] = {}
        self._snapshot_ids = count()

    @abstractmethod
    def _copied(self, table: Table) -> tuple[Table, tuple[BlockCopy, ...]]:
        """Return a table with the computed tokens of another, and the copies that this takes."""

    def _detach(self, table: Table) -> None:
        """Release what a table held that has been dropped."""

    def _rebuild(self) -> None:
        """Recompute everything that follows from the tables."""

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        return self._begin(child, self._tables[parent])

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        table, copies = self._copied(self._tables[seq_id])
        snapshot = Snapshot(next(self._snapshot_ids), table.computed)
        self._snapshots[snapshot.snapshot_id] = table
        return snapshot, copies

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        return self._begin(seq_id, self._snapshots[snapshot.snapshot_id])

    def release(self, snapshot: Snapshot) -> None:
        self._detach(self._snapshots.pop(snapshot.snapshot_id))

    def remove(self, seq_id: int) -> None:
        self._detach(self._tables.pop(seq_id))

    def rename(self, seq_id: int, new_id: int) -> None:
        assert new_id not in self._tables, f"sequence {new_id} is already there"
        self._tables[new_id] = self._tables.pop(seq_id)

    def clear(self) -> None:
        self._tables = {}
        self._rebuild()

    def _begin(self, seq_id: int, source: Table) -> tuple[BlockCopy, ...]:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._tables[seq_id], copies = self._copied(source)
        return copies

    def _all_tables(self) -> Iterator[Table]:
        return chain(self._tables.values(), self._snapshots.values())

    def _table_records(self) -> tuple[TableRecord, ...]:
        """Return every table in the order of the sequences, then those of the snapshots."""
        return tuple(
            TableRecord(owner, is_snapshot, tuple(table.blocks), table.computed, table.reserved)
            for owners, is_snapshot in ((self._tables, False), (self._snapshots, True))
            for owner, table in owners.items()
        )
