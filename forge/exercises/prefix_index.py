"""Exercise 6: a prefix index, and eviction. The index alone; then a prefix cache on it under the conformance
operations, with exact hits and the exact order of eviction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from forge.cache.block_table import BlockTable
from forge.cache.factory import CacheSize
from forge.cache.prefix import PrefixKvCache
from forge.exercises.cache_trial import CacheTrial
from forge.exercises.exercise import Exercise, Rule, Trial, search
from forge.testing import check_cache
from forge.trace.records import BlockEvicted

_BLOCKS, _BLOCK = 6, 4
_KINDS = {"begin": 8, "add": 2, "fill": 8, "commit": 3, "truncate": 1, "fork": 2, "remove": 7}


class PrefixBase(PrefixKvCache):
    """What exercise 6 gives: a prefix cache that asks the reader in which order blocks go."""

    def release_order(self, blocks: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError("release_order")

    def next_to_evict(self) -> int:
        raise NotImplementedError("next_to_evict")

    def _detach(self, table: BlockTable) -> None:
        self._filled = None
        for block in self.release_order(table.blocks):
            self._release_block(block)

    def _allocate(self, number: int) -> tuple[int, ...]:
        while len(self.pool.free) < number:
            oldest = self.next_to_evict()
            self._drop_from_index(oldest)
            self._counts["evictions"] += 1
            self._events.append(BlockEvicted(oldest, self.block_size))
        return super()._allocate(number)


RULES = {
    "keys": Rule("There is one key per full block.", "How many full blocks have 9 tokens, if a block has 4?"),
    "chained": Rule(
        "A block's key depends on every token before it, and on the salt.",
        "Two prompts with the same second block and another first one: may they share the second?",
    ),
    "child": Rule("child finds a node that was inserted behind this parent.", "Under which key was it entered?"),
    "proof": Rule(
        "A hash proves nothing: parent and tokens are compared before a block is served.",
        "What if two contents have the same hash?",
    ),
    "tree": Rule(
        "A new node is known to its parent, stands one deeper, and each block knows its node.",
        "Which of nodes, node_of, children and blocks must know a new block?",
    ),
    "same-content": Rule(
        "A second block with the same content stands behind the first.", "Which of several blocks is served?"
    ),
    "take-over": Rule(
        "If another block has the same content, that one takes over, and nothing is lost.",
        "Is the content gone if one of two blocks that hold it goes?",
    ),
    "lost": Rule(
        "Without another block the node goes, and with it every node behind it.",
        "How would a block be found whose parent is gone?",
    ),
    "eviction-order": Rule(
        "The least recently used cached block is evicted first, a leaf before what it stands behind.",
        "Which block of a sequence must be released first, so that its beginning stays longest?",
    ),
    "all-hits": Rule(
        "All that is there is found: full blocks of running and ended sequences.", "Which of these blocks is not found?"
    ),
    "contents": Rule("Only exactly the same tokens behind the same tokens are shared.", "Whose keys are served here?"),
    "removed": Rule("A removed sequence releases all of its blocks.", "Which of its blocks is still held?"),
    "conforms": Rule("It keeps every promise of a cache.", "Which of its functions is it?"),
}

_WORDS = (
    ("evicted|outlives|freed twice", "eviction-order"),
    ("there is", "all-hits"),
    ("contents", "contents"),
    ("not their hash|orphans|parent does not know|depth|without blocks|indexed|lost a child|without a node", "tree"),
    ("cached beside another|cacheable is not what is indexed|not its", "lost"),
    ("tables and has|is lost|used blocks", "removed"),
)


class IndexTrial(Trial):
    """The index alone."""

    def __init__(self, piece: ModuleType, *arguments: Any, line: str = ""):
        super().__init__(piece, f"index = piece.MyPrefixIndex({line})", "root = index.root('')")
        self.index = piece.MyPrefixIndex(*arguments)
        self.root = self.index.root("")

    def keys(self) -> None:
        ask = self.index.keys
        first = self.call("index.keys([1, 2, 3, 4, 5], 2)", ask, [1, 2, 3, 4, 5], 2)
        self.require(isinstance(first, tuple) and len(first) == 2, "keys", f"5 tokens in blocks of 2: {first!r}")
        full = self.call("index.keys([1, 2, 3, 4], 2)", ask, [1, 2, 3, 4], 2)
        self.require(full == first, "keys", f"4 tokens in blocks of 2 have 2 keys, those from before: {full!r}")
        other = self.call("index.keys([9, 2, 3, 4], 2)", ask, [9, 2, 3, 4], 2)
        self.require(other[1] != first[1], "chained", "the second block has the same key behind another first block")
        salted = self.call("index.keys([1, 2, 3, 4], 2, 'a')", ask, [1, 2, 3, 4], 2, "a")
        self.require(not set(salted) & set(first), "chained", "another salt has the same keys")
        node = self.index.root("")
        for number, key in enumerate(first):
            node_key = self.index._hash(node.key if number == 0 else first[0], (1, 2) if number == 0 else (3, 4))
            self.require(key == node_key, "chained", f"key {number} is not the hash of the key before and its tokens")

    def tree(self) -> None:
        index, root = self.index, self.root
        self.require(self.call("index.child(root, (1, 2))", index.child, root, (1, 2)) is None, "child", "of nothing")
        one = self.call("one = index.insert(root, (1, 2), 7)", index.insert, root, (1, 2), 7)
        self.require(one is not None, "tree", "insert returned None")
        self.require(one in root.children and one.depth == 1, "tree", f"depth {one.depth}, children {root.children}")
        self.require(index.node_of.get(7) is one and one.blocks == [7], "tree", f"node_of {index.node_of}")
        found = self.call("index.child(root, (1, 2))", index.child, root, (1, 2))
        self.require(found is one, "child", f"it is {found!r}")
        two = self.call("two = index.insert(one, (3, 4), 5)", index.insert, one, (3, 4), 5)
        self.require(two is not None and two.depth == 2 and two.parent is one, "tree", f"it is {two!r}")
        for parent, name in ((root, "root"), (one, "one")):
            found = self.call(f"index.child({name}, (3, 4))", index.child, parent, (3, 4))
            self.require((found is two) == (name == "one"), "child", f"behind {name} it is {found!r}")
        again = self.call("index.insert(root, (1, 2), 8)", index.insert, root, (1, 2), 8)
        self.require(again is one and one.blocks == [7, 8], "same-content", f"its blocks are {one.blocks}")
        lost = self.call("index.drop(7)", index.drop, 7)
        self.require(lost == [] and one.blocks == [8], "take-over", f"it returned {lost!r}; blocks {one.blocks}")
        found = self.call("index.child(root, (1, 2))", index.child, root, (1, 2))
        self.require(found is one and 7 not in index.node_of, "take-over", f"the child is {found!r}")
        lost = self.call("index.drop(8)", index.drop, 8)
        self.require(sorted(lost) == [5], "lost", f"it returned {lost!r}; block 5 stands behind")
        for parent, tokens, name in ((root, (1, 2), "root, (1, 2)"), (one, (3, 4), "one, (3, 4)")):
            found = self.call(f"index.child({name})", index.child, parent, tokens)
            self.require(found is None, "lost", "it is still found")
        rest = index.node_of, index._nodes, root.children
        self.require(not any(rest), "lost", f"left are node_of {rest[0]}, nodes {rest[1]}, children {rest[2]}")

    def collide(self) -> None:
        index, root = self.index, self.root
        one = self.call("one = index.insert(root, (1, 2), 7)", index.insert, root, (1, 2), 7)
        found = self.call("index.child(root, (3, 4))", index.child, root, (3, 4))
        self.require(found is None, "proof", f"it has the same hash and other tokens: {found!r}")
        found = self.call("index.child(one, (1, 2))", index.child, one, (1, 2))
        self.require(found is None, "proof", f"it has the same hash and tokens behind another parent: {found!r}")
        found = self.call("index.insert(root, (3, 4), 8)", index.insert, root, (3, 4), 8)
        self.require(found is None and 8 not in index.node_of, "proof", "another content has the same hash")


class PrefixTrial(CacheTrial):
    """Runs random operations on the reader's prefix index beside an oracle."""

    def __init__(self, piece: ModuleType):
        line = f"from forge.exercises.prefix_index import cache_of; cache = cache_of(piece, {_BLOCKS}, {_BLOCK})"
        super().__init__(piece, line, lambda: cache_of(piece, _BLOCKS, _BLOCK), _BLOCKS, _WORDS)


def cache_of(piece: ModuleType, num_blocks: int, block_size: int) -> PrefixBase:
    """The reader's cache, on the reader's index."""
    cache = piece.MyPrefixCache(num_blocks, block_size)
    cache.index = piece.MyPrefixIndex()
    return cache


def check(piece: ModuleType) -> None:
    IndexTrial(piece).keys()
    IndexTrial(piece).tree()
    IndexTrial(piece, lambda key, tokens: 1, line="lambda key, tokens: 1").collide()
    search(lambda: PrefixTrial(piece), _KINDS, lists=40)
    check_cache(lambda: cache_of(piece, 12, 4), lists=4)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def new_cache(size: CacheSize) -> PrefixKvCache:
        return cache_of(piece, size.num_blocks or 64, size.block_size)

    yield {"kv": new_cache, "num_blocks": 64}


_RUBRIC = "Read the story and say whether the fox in it was kind to the turtle, to the owl and to the hen. "

EXERCISE = Exercise(
    names=("MyPrefixIndex", "MyPrefixCache"),
    rules=RULES,
    hints=(
        "keys and insert hash the same: the key of what precedes, and the tokens of the block as a tuple.",
        "child is three questions: is there a node with this hash, is its parent this one, are its tokens these?",
        "drop: take the block out of node_of and out of its node's blocks. If the node has others, that is all. "
        "Otherwise walk the tree from this node down.",
        "pool.cached is ordered by release. So the order of eviction is decided when a sequence releases its blocks.",
    ),
    solution=("forge.cache.prefix_index.PrefixIndex", "forge.cache.prefix.PrefixKvCache._allocate"),
    check=check,
    engine=engine,
    own={"kv": "prefix", "num_blocks": 64},
    prompts=tuple(_RUBRIC + f"Story {number}:" for number in range(16)),
    params={"max_tokens": 8, "ignore_eos": True},
    view="blocks",
)
