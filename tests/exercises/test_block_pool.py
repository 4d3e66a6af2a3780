import pytest

from tests.exercises.mistakes import Wrong, check_right, check_wrong

WRONG = [
    Wrong("the last block is never handed out", "if number > len(self.free)", "if number >= len(self.free)", "enough"),
    Wrong(
        "blocks are taken until there is none",
        "        if number > len(self.free):\n            raise OutOfBlocks(number, len(self.free))\n",
        "",
        "raises",
    ),
    Wrong(
        "the shortage is noticed half way",
        "        if number > len(self.free):\n            raise OutOfBlocks(number, len(self.free))\n        taken = []\n        for _ in range(number):\n",
        "        taken = []\n        for _ in range(number):\n            if not self.free:\n                raise OutOfBlocks(number, 0)\n",
        "all-or-nothing",
    ),
    Wrong("no first reference", "            self.reference_counts[block] = 1\n", "", "first-reference"),
    Wrong("a block is looked at and not taken", "self.free.pop()", "self.free[-1]", "allocated"),
    Wrong("a fork is not counted", "        self.used(block)\n        self.reference_counts[block] += 1\n", "        self.used(block)\n", "counts"),
    Wrong("freed by the first of two", "        if self.reference_counts[block] == 0:\n            self.free", "        if True:\n            self.free", "free-at-zero"),
    Wrong("freed one too late", "if self.reference_counts[block] == 0:\n            self.free", "if self.reference_counts[block] < 0:\n            self.free", "returned"),
    Wrong("freed twice", "    def decref(self, block):\n        self.used(block)\n", "    def decref(self, block):\n", "misuse"),
    Wrong("a block beyond the pool", "if not 0 <= block < self.num_blocks", "if not 0 <= block <= self.num_blocks", "misuse"),
    Wrong("references are not added up", "        self.num_references -= 1\n", "", "sum"),
    Wrong("old counts stay after recount", "        self.reference_counts[:] = [0] * self.num_blocks\n", "", "recount"),
    Wrong("the free list stays after recount", "        self.free = [block for block in range(self.num_blocks) if not self.reference_counts[block]]\n", "", "recount"),
    Wrong("an endless loop", "        taken = []\n", "        taken = []\n        while number:\n            pass\n", "endless"),
]  # fmt: skip


def test_a_right_pool_passes(tmp_path):
    check_right("block_pool", tmp_path)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.mistake)
def test_a_mistake_is_named(wrong, tmp_path):
    check_wrong("block_pool", wrong, tmp_path)
