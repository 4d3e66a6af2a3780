"""Exercise 6: a prefix index, and eviction. The check tests the index alone, then runs the conformance operations on a
prefix cache with it, where hits and the order of eviction must be exact."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from forge.cache.prefix import PrefixKvCache
from forge.cache.prefix_index import ChainHash, Node, PrefixIndex, Tokens, chain_hash
from forge.exercises.exercise import Costs, Exercise, Part, Trial, cache_of_kind, to_write, words_of
from forge.exercises.trials import CacheTrial, search
from forge.testing import check_cache

_BLOCKS, _BLOCK = 6, 4
_KINDS = {"begin": 8, "add": 2, "fill": 8, "commit": 3, "truncate": 1, "fork": 2, "remove": 7}


@to_write("keys", "child", "insert", "drop")
class IndexBase(PrefixIndex):
    """Given with exercise 6: the roots, the hash and the index's invariant check."""


class PrefixBase(PrefixKvCache):
    """Given with exercise 6: a prefix cache that asks the reader in which order to release blocks."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size, evict=self._content_to_evict)

    def release_order(self, blocks: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError("release_order")

    def next_to_evict(self) -> int:
        raise NotImplementedError("next_to_evict")

    def _content_to_evict(self, leaves: Iterator[Node], requests: int) -> Node:
        return self.index.node_of[self.next_to_evict()]


_WORDS = (
    ("evicted|outlives|freed twice", "eviction-order"),
    ("there is", "all-hits"),
    ("contents", "contents"),
    ("not their hash|orphans|parent does not know|depth|without blocks|indexed|lost a child|without a node", "tree"),
    ("cached beside another|cacheable|not its", "lost"),
    ("tables and has|is lost|used blocks", "removed"),
)


class IndexTrial(Trial):
    """Checks the index alone."""

    def __init__(self, piece: ModuleType, *arguments: Any, line: str = ""):
        super().__init__(piece, f"index = piece.MyPrefixIndex({line})", "root = index.root('')")
        self.index = piece.MyPrefixIndex(*arguments)
        self.root = self.index.root("")

    def keys(self) -> None:
        index = self.index
        for length in (5, 4, 0, 1, 9, 3):
            for size in (1, 2, 4):
                tokens = [(7 * place + length) % 11 for place in range(length)]
                for salt in ("", "a", "tenant 2", "ü"):
                    line = f"index.keys({tokens}, {size}, {salt!r})"
                    keys = self.call_anew(line, index.keys, tokens, size, salt)
                    self.require(isinstance(keys, tuple), "result", f"keys returned {keys!r}")
                    finding = f"{length} tokens in blocks of {size} have {length // size} keys: {keys!r}"
                    self.require(len(keys) == length // size, "keys", finding)
                    expected = PrefixIndex().keys(tokens, size, salt)
                    pairs = enumerate(zip(keys, expected, strict=True))
                    wrong = next((number for number, (key, right) in pairs if key != right), None)
                    finding = f"key {wrong} is not the hash of the key before it and its tokens"
                    self.require(wrong is None, "chained", finding)
        self.require(not index.nodes and not index.node_of, "result", "keys has changed the index")

        def work(blocks: int) -> Callable[[], object]:
            tokens = [number % 50 for number in range(4 * blocks)]
            return lambda: index.keys(tokens, 4)

        self.require_growth("index.keys(list(range(128_000)), 4)", work, 1_000, 32_000, 120)

    def deep(self) -> None:
        """Insert and drop a prompt of thousands of blocks: recursion and quadratic time fail here."""

        def work(blocks: int) -> Callable[[], None]:
            def steps() -> None:
                index = self.piece.MyPrefixIndex()
                root = node = index.root("")
                for block in range(blocks):
                    node = index.insert(node, (block, 1), block)
                for block in range(blocks):
                    root = index.child(root, (block, 1))
                lost = index.drop(0)
                assert len(lost) == blocks - 1, f"{len(lost)} blocks stood behind block 0, and not {blocks - 1}"

            return steps

        line = "index.drop(0); index.insert(root, (0,), 0); index.child(root, (0,))  # among 30,000 contents"
        self.require_growth(line, self._wide, 100, 30_000, 20)
        line = (
            "node = root; for block in range(6_000): node = index.insert(node, (block, 1), block); then index.drop(0)"
        )
        self.require_growth(line, work, 300, 6_000, 100)

    def _wide(self, contents: int) -> Callable[[], None]:
        index = self.piece.MyPrefixIndex()
        root = index.root("")
        for block in range(contents):
            index.insert(root, (block,), block)

        def steps() -> None:
            for block in range(20):
                index.drop(block)
                index.insert(root, (block,), block)
                index.child(root, (block,))

        return steps

    def beside_a_tree(self, seed: int, chain: ChainHash) -> None:
        """Insert and drop random blocks in the reader's index and in the engine's own, and compare both."""
        random_, reference = random.Random(seed), PrefixIndex(chain)
        ours: dict[str, Node] = {"root": self.root}
        theirs = {"root": reference.root("")}
        for number in range(30):
            name, tokens = random_.choice(list(ours)[-5:]), (random_.randrange(3), 1)
            if random_.random() < 0.3 and reference.node_of:
                block = random_.choice(sorted(reference.node_of))
                lost, expected = self.call(f"index.drop({block})", self.index.drop, block), reference.drop(block)
                self.require(isinstance(lost, list), "result", f"drop returned {lost!r}")
                finding = f"the blocks behind it are {sorted(expected)}, and it returned {lost!r}"
                self.require(sorted(lost) == sorted(expected), "lost" if expected else "take-over", finding)
            else:
                line = f"n{number} = index.insert({name}, {tokens}, {number})"
                child = self.call(line, self.index.insert, ours[name], tokens, number)
                expected_node = reference.insert(theirs[name], tokens, number)
                finding = f"it returned {child!r}"
                self.require((child is None) == (expected_node is None), "proof" if child else "tree", finding)
                if expected_node is not None:
                    ours[f"n{number}"], theirs[f"n{number}"] = child, expected_node
            alive = [
                name
                for name, node in theirs.items()
                if name == "root" or (node.blocks and reference.nodes.get(node.key) is node)
            ]
            ours, theirs = {name: ours[name] for name in alive}, {name: theirs[name] for name in alive}
            for name, node in theirs.items():
                same = ours[name].blocks == node.blocks and ours[name].depth == node.depth
                finding = (
                    f"{name} has blocks {ours[name].blocks} at depth {ours[name].depth}, and should have {node.blocks}"
                )
                self.require(same and ours[name].token_ids == node.token_ids, "as-one", finding)
            for name in (random_.choice(list(ours)) for _ in range(3)):
                tokens = (random_.randrange(3), 1)
                child = self.call(f"index.child({name}, {tokens})", self.index.child, ours[name], tokens)
                expected_node = reference.child(theirs[name], tokens)
                blocks = None if expected_node is None else expected_node.blocks
                theirs_now = None if child is None else child.blocks
                self.require(theirs_now == blocks, "as-one", f"its blocks are {theirs_now}, and should be {blocks}")
                self.calls.pop()
            known = self.index.node_of.keys() == reference.node_of.keys()
            known = known and self.index.nodes.keys() == reference.nodes.keys()
            finding = f"indexed are blocks {sorted(self.index.node_of)}, and should be {sorted(reference.node_of)}"
            self.require(known, "as-one", finding)

    def tree(self) -> None:
        index, root = self.index, self.root
        self.require(self.call("index.child(root, (1, 2))", index.child, root, (1, 2)) is None, "child", "of nothing")
        first = self.call("first = index.insert(root, (1, 2), 7)", index.insert, root, (1, 2), 7)
        self.require(first is not None, "tree", "insert returned None")
        finding = f"depth {first.depth}, children {root.children}"
        self.require(first in root.children and first.depth == 1, "tree", finding)
        self.require(index.node_of.get(7) is first and first.blocks == [7], "tree", f"node_of {index.node_of}")
        child = self.call("index.child(root, (1, 2))", index.child, root, (1, 2))
        self.require(child is first, "child", f"it is {child!r}")
        second = self.call("second = index.insert(first, (3, 4), 5)", index.insert, first, (3, 4), 5)
        self.require(second is not None and second.depth == 2 and second.parent is first, "tree", f"it is {second!r}")
        for parent, name in ((root, "root"), (first, "first")):
            child = self.call(f"index.child({name}, (3, 4))", index.child, parent, (3, 4))
            self.require((child is second) == (name == "first"), "child", f"behind {name} it is {child!r}")
        again = self.call("index.insert(root, (1, 2), 7)", index.insert, root, (1, 2), 7)
        finding = f"block 7 was there already; its blocks are {first.blocks}"
        self.require(again is first and first.blocks == [7], "same-content", finding)
        again = self.call("index.insert(root, (1, 2), 8)", index.insert, root, (1, 2), 8)
        self.require(again is first and first.blocks == [7, 8], "same-content", f"its blocks are {first.blocks}")
        lost = self.call("index.drop(7)", index.drop, 7)
        self.require(lost == [] and first.blocks == [8], "take-over", f"it returned {lost!r}; blocks {first.blocks}")
        child = self.call("index.child(root, (1, 2))", index.child, root, (1, 2))
        self.require(child is first and 7 not in index.node_of, "take-over", f"the child is {child!r}")
        lost = self.call("index.drop(8)", index.drop, 8)
        self.require(sorted(lost) == [5], "lost", f"it returned {lost!r}; block 5 stands behind")
        for parent, tokens, name in ((root, (1, 2), "root, (1, 2)"), (first, (3, 4), "first, (3, 4)")):
            child = self.call(f"index.child({name})", index.child, parent, tokens)
            self.require(child is None, "lost", "it is still found")
        rest = index.node_of, index.nodes, root.children
        self.require(not any(rest), "lost", f"left are node_of {rest[0]}, nodes {rest[1]}, children {rest[2]}")

    def collide(self) -> None:
        index, root = self.index, self.root
        first = self.call("first = index.insert(root, (1, 2), 7)", index.insert, root, (1, 2), 7)
        node = self.call("index.child(root, (3, 4))", index.child, root, (3, 4))
        self.require(node is None, "proof", f"it has the same hash and other tokens: {node!r}")
        node = self.call("index.child(first, (1, 2))", index.child, first, (1, 2))
        self.require(node is None, "proof", f"it has the same hash and tokens behind another parent: {node!r}")
        node = self.call("index.insert(root, (3, 4), 8)", index.insert, root, (3, 4), 8)
        self.require(node is None and 8 not in index.node_of, "proof", "another content has the same hash")


class PrefixTrial(CacheTrial):
    """Runs random operations on the reader's prefix index beside an oracle."""

    def __init__(self, piece: ModuleType):
        line = f"from forge.exercises.prefix_index import cache_of; cache = cache_of(piece, {_BLOCKS}, {_BLOCK})"
        super().__init__(piece, line, lambda: cache_of(piece, _BLOCKS, _BLOCK), _BLOCKS, _WORDS)


def cache_of(piece: ModuleType, num_blocks: int, block_size: int) -> PrefixBase:
    """Create the reader's cache with the reader's index."""
    cache = piece.MyPrefixCache(num_blocks, block_size)
    cache.index = piece.MyPrefixIndex()
    cache.pool.cacheable = cache.index.node_of
    return cache


def _check_index(piece: ModuleType) -> None:
    IndexTrial(piece).tree()
    IndexTrial(piece, lambda key, tokens: 1, line="lambda key, tokens: 1").collide()
    for seed in range(12):
        IndexTrial(piece).beside_a_tree(seed, chain_hash)
        few = IndexTrial(piece, _few_hashes, line="lambda key, tokens: hash((key, tokens)) % 5 + 1")
        few.beside_a_tree(seed, _few_hashes)
    IndexTrial(piece).deep()


def _few_hashes(key: int, tokens: Tokens) -> int:
    return hash((key, tokens)) % 5 + 1


def _check_cache(piece: ModuleType) -> None:
    trial = PrefixTrial(piece)
    for blocks in ((3, 0, 4), (2,), ()):
        order = trial.call(f"cache.release_order({blocks})", trial.cache.release_order, blocks)  # type: ignore[attr-defined]
        order = list(order) if isinstance(order, Iterable) else order
        finding = f"of {blocks} it returned {order!r}"
        trial.require(isinstance(order, list) and sorted(order) == sorted(blocks), "same-order", finding)
    search(lambda: PrefixTrial(piece), _KINDS, lists=40)
    check_cache(lambda: cache_of(piece, 12, 4), lists=4)


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    return cache_of_kind("prefix", lambda cache, size: cache_of(piece, cache.pool.num_blocks, size.block_size))


def _cost(piece: ModuleType | None, blocks: int) -> Callable[[], object]:
    cache = cache_of(piece, 300, 16) if piece else PrefixKvCache(300, 16)
    tokens = [number % 100 for number in range(16 * blocks)]

    def work() -> None:
        for seq_id in range(4):
            cache.add(seq_id, tokens)
            cache.reserve(seq_id, len(tokens) - cache.reserved_length(seq_id))
            cache.commit(seq_id, tokens[cache.computed_length(seq_id) :])
            cache.remove(seq_id)

    return work


_RUBRIC = "Read the story and say whether the fox in it was kind to the turtle, to the owl and to the hen. "

_STORIES = (
    "the fox lent the turtle a lantern, and the turtle brought it back in the morning.",
    "the owl had lost a feather, and the fox looked for it under every oak of the wood.",
    "the hen was alone in the snow until a mole dug a way from her door to the mill.",
    "the duck sang so loudly that the whole village lay awake until midnight.",
)

EXERCISE = Exercise(
    **words_of("prefix_index"),
    parts=(
        Part.of("MyPrefixIndex", "keys", lambda piece: IndexTrial(piece).keys()),
        Part.of("MyPrefixIndex", "child insert drop", _check_index),
        Part(
            (
                *(f"MyPrefixIndex.{name}" for name in ("keys", "child", "insert", "drop")),
                "MyPrefixCache.release_order",
                "MyPrefixCache.next_to_evict",
            ),
            _check_cache,
        ),
    ),
    costs=Costs("the same prompt of {} blocks 4 times", (4, 32, 256), _cost),
    engine=engine,
    options={"kv": "prefix", "num_blocks": 22, "max_num_seqs": 4, "max_model_len": 256},
    prompts=(
        *(_RUBRIC + f"Story {number}: {_STORIES[number % 4]}" for number in range(8)),
        *(f"{_STORIES[number]} That was story {number}. {_STORIES[number - 1]}" for number in range(4)),
    ),
    params=({"max_tokens": 8, "ignore_eos": True},),
    view="blocks",
)
