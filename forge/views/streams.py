"""The text of a run as it grows, put together from its records: one string per sample."""

from forge.trace.records import StepRecord


class TextStreams:
    """Collects what each sequence has said. Sequences are numbered in the order in which they first appear."""

    def __init__(self):
        self.texts: list[str] = []
        self._index: dict[int, int] = {}

    def feed(self, record: StepRecord) -> list[tuple[int, str]]:
        """Take in one step; returns what it added, as (sample, text) with nothing empty."""
        for item in record.items:
            self.index_of(item.seq_id)
        added = [(self.index_of(token.seq_id), token.text) for token in record.tokens]
        added += [(self.index_of(finish.seq_id), finish.text) for finish in record.finished]
        for sample, text in added:
            self.texts[sample] += text
        return [(sample, text) for sample, text in added if text]

    def index_of(self, seq_id: int) -> int:
        if seq_id not in self._index:
            self._index[seq_id] = len(self._index)
            self.texts.append("")
        return self._index[seq_id]
