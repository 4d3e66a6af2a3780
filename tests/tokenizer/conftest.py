"""A small tokenizer of Qwen's kind, trained here, in the three forms that the tests compare.

`hugging_face` is the judge: a `tokenizers.Tokenizer` assembled from a tokenizer.json by hand. `spec` is the same
vocabulary as a GGUF file would carry it, with three tokens of padding at the end.
"""

import json

import pytest

from forge.tokenizer import Tokenizer, TokenizerSpec, TokenType

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>")
NUM_PADDING = 3
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING_TEXT = (
    "The scheduler admits a request when the pool has blocks for it, and the others wait in the queue.",
    "A block table maps the positions of a sequence to blocks; two sequences may share a block they do not write.",
    "It's what they've said: we'll see, I'm sure you're right, he'd know, and it won't hurt.",
    "def schedule(self):\n    while self.waiting:\n        sequence = self.waiting[0]\n        if not self.fits():\n",
    "Der Größere wäre später übrig geblieben. Le garçon naïf a mangé à l'été dernier. Señor, ¿qué pasó mañana?",
    "Планировщик принимает запрос, когда в пуле есть блоки. 调度器接受请求。スケジューラは要求を待たせる。",
    "users\r\nlines\r\n\r\n    indented\n\n\n\tand tabbed  , then   spaces    12 345 6789",
)


def tokenizer_document(vocabulary: dict[str, int], merges: list[list[str]]) -> dict:
    """A tokenizer.json of Qwen's kind; control and user-defined tokens follow the vocabulary."""
    first = len(vocabulary)
    added = [
        {"id": first + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": token in CONTROL}
        for i, token in enumerate((*CONTROL, *USER_DEFINED))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": ""}
    model |= {"end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model | {"vocab": vocabulary, "merges": merges},
    }


@pytest.fixture(scope="session")
def document() -> dict:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        TRAINING_TEXT * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return tokenizer_document(model["vocab"], merges)


@pytest.fixture(scope="session")
def hugging_face(document):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(document))


@pytest.fixture(scope="session")
def entries(document) -> dict:
    """The arguments of `TokenizerSpec`, to be changed by tests of malformed files."""
    vocabulary = document["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), *CONTROL, *USER_DEFINED]
    types = [TokenType.NORMAL] * len(vocabulary) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] * 2
    padding = [f"[PAD{len(tokens) + i}]" for i in range(NUM_PADDING)]
    return {
        "tokens": tokens + padding,
        "token_types": types + [TokenType.UNUSED] * NUM_PADDING,
        "merges": [" ".join(merge) for merge in document["model"]["merges"]],
        "bos_token_id": tokens.index("<|endoftext|>"),
        "special_ids": {"eos_token_id": tokens.index("<|im_end|>")},
    }


@pytest.fixture(scope="session")
def spec(entries) -> TokenizerSpec:
    return TokenizerSpec(**entries)


@pytest.fixture(scope="session")
def tokenizer(spec) -> Tokenizer:
    return Tokenizer(spec)
