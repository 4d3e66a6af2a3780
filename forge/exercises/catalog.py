"""Which exercises there are. Importing this loads nothing of the engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import UsageError

if TYPE_CHECKING:
    from forge.exercises.exercise import Exercise


@dataclass(frozen=True)
class Entry:
    """One exercise in the list."""

    number: int
    name: str
    """The name of its module and its template."""
    title: str
    chapter: str
    """The command of the chapter to read first."""
    hours: str
    """How long the exercise takes a reader."""

    @property
    def file_name(self) -> str:
        return f"{self.number:02}_{self.name}.py"

    @property
    def template(self) -> Path:
        return Path(__file__).parent / "templates" / f"{self.name}.py"

    @property
    def words(self) -> Path:
        """The file with what it says to the reader."""
        return self.template.with_suffix(".toml")

    def exercise(self) -> "Exercise":
        from importlib import import_module

        return import_module(f"forge.exercises.{self.name}").EXERCISE


ENTRIES = (
    Entry(1, "sampling", "From a row of logits to a token", "naive", "1"),
    Entry(2, "attention", "One head of causal attention", "naive", "1"),
    Entry(3, "contiguous_cache", "A contiguous KV cache", "kv-cache", "1"),
    Entry(4, "block_pool", "A block pool", "paged", "1"),
    Entry(5, "paged_cache", "A paged KV cache with copy-on-write", "paged", "2 to 3"),
    Entry(6, "prefix_index", "A prefix index with eviction", "prefix", "2 to 3"),
    Entry(7, "scheduler", "A scheduler's decision", "batching", "2 to 3"),
    Entry(8, "preemption", "A victim policy, and what preemption does", "batching", "1 to 2"),
    Entry(9, "verification", "Verification of draft tokens", "speculation", "1 to 2"),
    Entry(10, "ngram_proposer", "A proposer: n-gram lookup", "speculation", "1"),
    Entry(11, "router", "A router that knows prefixes", "cluster", "1"),
    Entry(12, "streaming_text", "Text while it comes, and stop strings", "serving", "1"),
    Entry(13, "grammar_mask", "A mask for a small grammar", "constrained", "1 to 2"),
)


def find_entry(name: str) -> Entry:
    """Return the exercise of this number or name. Raises `UsageError` if there is none."""
    for entry in ENTRIES:
        if name.replace("-", "_") in (str(entry.number), f"{entry.number:02}", entry.name):
            return entry
    numbers = ", ".join(str(entry.number) for entry in ENTRIES)
    raise UsageError(f"there is no exercise {name}; there are {numbers}")
