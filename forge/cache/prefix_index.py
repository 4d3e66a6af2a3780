"""The index of the prefix cache: from the tokens of a prompt to the blocks that hold their keys and values.

A key or value depends on every token before it, so a block can be used again only behind the same tokens. Full blocks
are therefore nodes of a tree whose edges are the tokens of one block: a node stands for everything from the beginning
of a sequence up to the end of its block. Nodes are found by a hash chained from block to block (automatic prefix
caching of vLLM; a radix tree, as SGLang's, holds the same facts). A hash proves nothing, so parent and tokens are
compared before a block is served; of two contents with the same hash the second is not indexed.

A *salt* has a root of its own, and roots share nothing. The index knows contents. Reference counts and the order of
eviction are the pool's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

Tokens = tuple[int, ...]
ChainHash = Callable[[int, Tokens], int]
"""From the hash of all that precedes (0 for nothing) and the tokens that follow, to the hash of both."""


def chain_hash(preceding: int, token_ids: Tokens) -> int:
    """Hash a block behind its parent: 64 bits, the same in every process."""
    return hash((preceding, token_ids))  # Python salts the hashes of texts, not those of numbers


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """The content of a block: its tokens, behind those of its parent."""

    key: int
    parent: "Node | None"
    """None for a root."""
    depth: int
    """How many blocks it is from the root."""
    token_ids: Tokens = ()
    blocks: list[int] = field(default_factory=list)
    """The blocks that hold this content, the one that is served in front. Never empty, but for a root."""
    children: set["Node"] = field(default_factory=set)
    num_hits: int = 0
    """How often a request found it."""
    last_request: int = 0
    """The number of the request that computed or found it last."""


class IndexSubscriber:
    """Told which contents enter and leave the index, by the keys of `PrefixIndex.keys`. This one ignores both."""

    def published(self, key: int) -> None:
        """A content has entered the index."""

    def evicted(self, key: int) -> None:
        """The last block with a content has left it."""


class PrefixIndex:
    """Finds the block that holds given tokens behind given tokens.

    Holds a tree of `Node`s per salt, and a hash table over all of them. Promises to return a node only for exactly its
    tokens, and that every node can be reached from its root: dropping a content drops what stands behind it.
    """

    def __init__(self, hash_function: ChainHash = chain_hash):
        self.node_of: dict[int, Node] = {}
        """For each indexed block its content. To be read."""
        self.subscriber = IndexSubscriber()
        self.hash_function = hash_function
        self.nodes: dict[int, Node] = {}
        """Every content by its hash. To be read."""
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()
        """A root lives for as long as a node or a sequence refers to it."""

    def root(self, salt: str) -> Node:
        """Return the node where every sequence with this salt begins."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(self.hash_function(0, tuple(salt.encode())), None, 0)
        return root

    def child(self, parent: Node, token_ids: Tokens) -> Node | None:
        """Return the node of a block of `token_ids` behind `parent`, if there is one."""
        node = self.nodes.get(self.hash_function(parent.key, token_ids))
        return node if node is not None and node.parent is parent and node.token_ids == token_ids else None

    def insert(self, parent: Node, token_ids: Tokens, block: int) -> Node | None:
        """Index a block under its content, behind other blocks that have the same.

        Returns None, with nothing indexed, if another content has the same hash.
        """
        key = self.hash_function(parent.key, token_ids)
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, parent, parent.depth + 1, token_ids)
            parent.children.add(node)
            self.subscriber.published(key)
        elif node.parent is not parent or node.token_ids != token_ids:
            return None
        if block not in node.blocks:
            node.blocks.append(block)
            self.node_of[block] = node
        return node

    def drop(self, block: int) -> list[int]:
        """Take its content from a block; the next block that has the same takes over.

        Without a next one, what stands behind it cannot be found any more: returns the blocks whose content is lost.
        """
        node = self.node_of.pop(block)
        node.blocks.remove(block)
        if node.blocks:
            return []
        if node.parent is not None:
            node.parent.children.discard(node)
        lost, doomed = [], [node]
        while doomed:
            node = doomed.pop()
            del self.nodes[node.key]
            self.subscriber.evicted(node.key)
            for orphan in node.blocks:
                del self.node_of[orphan]
            lost += node.blocks
            doomed += node.children
        return lost

    def clear(self) -> None:
        for key in self.nodes:
            self.subscriber.evicted(key)
        self.node_of.clear()
        self.nodes.clear()
        self._roots.clear()

    def keys(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
        """Return the chained hash of each full block of a prompt. Changes nothing."""
        key, keys = self.root(salt).key, []
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            key = self.hash_function(key, tuple(token_ids[start : start + block_size]))
            keys.append(key)
        return tuple(keys)

    def check_invariants(self) -> None:
        """Raise AssertionError if the tree, the hashes and the blocks do not belong together."""
        roots = set(self._roots.values())
        for key, node in self.nodes.items():
            parent = node.parent
            assert parent is not None, "a root among the nodes"
            assert node.key == key == self.hash_function(parent.key, node.token_ids), f"{node.blocks}: not their hash"
            assert parent in roots or self.nodes.get(parent.key) is parent, f"{node.blocks}: orphans"
            assert node in parent.children, f"{node.blocks}: their parent does not know them"
            assert node.depth == parent.depth + 1, f"{node.blocks}: not at this depth"
            assert node.blocks, "a node without blocks"
            assert all(self.node_of[block] is node for block in node.blocks), f"{node.blocks}: indexed elsewhere"
            assert len(set(node.blocks)) == len(node.blocks), f"{node.blocks}: indexed twice"
            assert all(self.nodes.get(child.key) is child for child in node.children), f"{node.blocks}: lost a child"
        assert sum(len(node.blocks) for node in self.nodes.values()) == len(self.node_of), "a block without a node"
