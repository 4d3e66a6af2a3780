from forge.cache.prefix_index import Node, PrefixIndex
from forge.exercises.prefix_index import PrefixBase


class MyPrefixIndex(PrefixIndex):
    def keys(self, token_ids, block_size, salt=""):
        key = self.root(salt).key
        keys = []
        for start in range(0, len(token_ids) // block_size * block_size, block_size):
            key = self.hash_function(key, tuple(token_ids[start : start + block_size]))
            keys.append(key)
        return tuple(keys)

    def child(self, parent, token_ids):
        node = self.nodes.get(self.hash_function(parent.key, token_ids))
        if node is None or node.parent is not parent:
            return None
        return node if node.token_ids == token_ids else None

    def insert(self, parent, token_ids, block):
        key = self.hash_function(parent.key, token_ids)
        node = self.child(parent, token_ids)
        if node is None:
            if key in self.nodes:
                return None
            node = Node(key, parent, parent.depth + 1, token_ids)
            self.nodes[key] = node
            parent.children.add(node)
        if block not in node.blocks:
            node.blocks.append(block)
            self.node_of[block] = node
        return node

    def drop(self, block):
        node = self.node_of.pop(block)
        node.blocks.remove(block)
        if node.blocks:
            return []
        node.parent.children.discard(node)
        lost = []
        waiting = [node]
        while waiting:
            gone = waiting.pop()
            del self.nodes[gone.key]
            for orphan in gone.blocks:
                del self.node_of[orphan]
                lost.append(orphan)
            waiting.extend(gone.children)
        return lost


class MyPrefixCache(PrefixBase):
    def release_order(self, blocks):
        return blocks[::-1]

    def next_to_evict(self):
        return next(iter(self.pool.cached))
