"""The suite for models: ours keep every promise, and a model that breaks one is told which."""

import numpy as np
import pytest

from forge.backends.cpu.backend import CpuBackend
from forge.cache.kv_storage import KvLayout
from forge.model.hash_model import HashModel
from forge.model.loader import LoadedModel, load_model
from forge.model.model import Model
from forge.testing import MODEL_CHECKS, check_model
from forge.tokenizer.byte_tokenizer import ByteTokenizer
from tests.small_models import write_small_qwen3

each_check = pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)


@pytest.fixture(scope="module", params=["hash", "tales-draft", "F32", "Q4_0"])
def loaded(request, tmp_path_factory) -> LoadedModel:
    """On the CPU: without weights; as bundled; with tensors of one type."""
    if request.param in ("hash", "tales-draft"):
        return load_model(request.param, CpuBackend)
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", tensor_type=request.param)
    return load_model(path, lambda: CpuBackend(threads=2))


@each_check
def test_our_models_keep_every_promise(check, loaded):
    check(loaded)


class Sum(Model):
    """A row's logits are a sum over the keys of its context. Whole numbers: it is exact in any order."""

    vocab_size, num_layers, max_position_embeddings = 259, 1, 512

    def kv_layout(self, num_blocks, block_size, kv_dtype="float32"):
        return KvLayout(1, num_blocks, block_size, num_kv_heads=1, head_dim=1, kv_dtype=kv_dtype)

    def forward(self, batch, storage):
        keys, written = storage.keys.reshape(-1), self.written(batch)
        keys[batch.slot_mapping[written]] = batch.token_ids[written]
        rows = [self.logits(batch, storage, row) for row in batch.logit_rows]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def written(self, batch):
        return batch.slot_mapping >= 0

    def logits(self, batch, storage, row):
        owner = np.searchsorted(batch.cu_seqlens, row, side="right") - 1
        length = self.context(batch, owner, row)
        keys, _ = storage.gather(0, batch.block_tables[owner], length)
        return (np.arange(self.vocab_size) * 7 + self.total(keys)) % 259

    def context(self, batch, owner, row):
        return int(batch.positions[row]) + 1

    def total(self, keys):
        return (keys.ravel() * np.arange(1, len(keys) + 1)).sum()


class Wide(Sum):
    """Broken on purpose: its logits are float64."""

    def forward(self, batch, storage):
        return super().forward(batch, storage).astype(np.float64)


class Drawn(Sum):
    """Broken on purpose: it says something else every time."""

    def __init__(self):
        self.calls = 0

    def total(self, keys):
        self.calls += 1
        return super().total(keys) + self.calls


class Lent(Sum):
    """Broken on purpose: it gives away the array that it computes in."""

    def __init__(self):
        self.array = np.zeros((1 << 12, self.vocab_size), np.float32)

    def forward(self, batch, storage):
        found = super().forward(batch, storage)
        self.array[: len(found)] = found
        return self.array[: len(found)]


class Foresighted(Sum):
    """Broken on purpose: a row sees all keys of its sequence that are there."""

    def context(self, batch, owner, row):
        return int(batch.context_lens[owner])


class Crowded(Sum):
    """Broken on purpose: how many sequences there are can be seen."""

    def logits(self, batch, storage, row):
        return super().logits(batch, storage, row) + batch.num_sequences


class Chunky(Sum):
    """Broken on purpose: where the chunk of a row begins can be seen."""

    def logits(self, batch, storage, row):
        owner = np.searchsorted(batch.cu_seqlens, row, side="right") - 1
        return super().logits(batch, storage, row) + batch.positions[batch.cu_seqlens[owner]]


class Padded(Sum):
    """Broken on purpose: it reads its last block to the end, and with it what was there before."""

    def context(self, batch, owner, row):
        size = self.block_size
        return -(-super().context(batch, owner, row) // size) * size

    def forward(self, batch, storage):
        self.block_size = storage.layout.block_size
        return super().forward(batch, storage)


class Messy(Sum):
    """Broken on purpose: padding is written to the last slot."""

    def written(self, batch):
        return slice(None)


class Adding(Sum):
    """Broken on purpose: it adds to the slot what it should put there."""

    def forward(self, batch, storage):
        before = storage.keys.copy()
        super().forward(batch, storage)
        storage.keys.reshape(-1)[batch.slot_mapping] += before.reshape(-1)[batch.slot_mapping]
        return super().forward(batch, storage) if not before.any() else self.again(batch, storage)

    def again(self, batch, storage):
        rows = [self.logits(batch, storage, row) for row in batch.logit_rows]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)


BROKEN = [
    (Wide, "logits are not float32 but float64"),
    (Drawn, "which other rows have logits too can be seen"),
    (Lent, "a later forward writes into the logits of an earlier one"),
    (Foresighted, "attention is not causal"),
    (Crowded, "beside the rows of 1 other sequences a row has other logits than alone"),
    (Chunky, "in chunks of 1 a token has other logits than in one prefill"),
    (Messy, "a row whose slot is -1 wrote into the storage"),
]


def named(model: Model) -> LoadedModel:
    return LoadedModel(name="test", model=model, tokenizer=ByteTokenizer())


def test_a_sound_model_passes():
    check_model(named(Sum()))


@pytest.mark.parametrize(("model", "said"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_model_is_told_what_it_violates(model, said):
    with pytest.raises(AssertionError, match=said):
        check_model(named(model()))


@pytest.mark.parametrize("model", [Padded, Adding])
def test_a_model_that_reads_what_others_left_is_found_out(model):
    with pytest.raises(AssertionError, match=r"other logits|can be seen"):
        check_model(named(model()))


class Forgetful(HashModel):
    """Broken on purpose, where only the engine sees it: from the 40th forward on it is another model."""

    calls = 0

    def _logits(self, contexts):
        self.calls += 1
        found = super()._logits(contexts)
        return np.roll(found, 1, axis=1) if self.calls > 40 else found


def test_the_engines_check_says_under_which_technique_the_model_says_something_else():
    check = MODEL_CHECKS[-1]
    with pytest.raises(AssertionError, match=r"request \d says|other logits"):
        check(named(Forgetful()))
