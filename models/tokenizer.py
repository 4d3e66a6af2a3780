"""The tokenizer of the family: byte-level BPE with Qwen's pre-tokenizer, trained on the generated corpus.

The vocabulary has exactly `VOCAB_SIZE` tokens: 5 control tokens at the end, all 256 bytes, and merges. Every answer label of
`corpus.questions` is shown to the trainer often enough to become one token where an answer starts (after "assistant" and a newline).
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .corpus.documents import document
from .corpus.questions import LABELS

VOCAB_SIZE = 4096
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKENS = ("<think>", "</think>")
ADDED_TOKENS = (*CONTROL_TOKENS, *USER_DEFINED_TOKENS)
TRAINING_DOCUMENTS = range(10**9 - 12_000, 10**9)
LABEL_WEIGHT = 400
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def all_labels() -> list[str]:
    """Every word that can be an answer, once, in a fixed order."""
    return list(dict.fromkeys(label for labels in LABELS.values() for label in labels))


def train_tokenizer() -> Tokenizer:
    """Train from nothing; the same result every time."""
    tokenizer = with_qwen_rules(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    add_tokens(tokenizer)
    check_tokenizer(tokenizer)
    return tokenizer


def tokenizer_of(tokens: list[str], merges: list[str]) -> Tokenizer:
    """The tokenizer with these tokens, in the order of their numbers and without the added ones, and these merges ("a b")."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = with_qwen_rules(Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs)))
    add_tokens(tokenizer)
    return tokenizer


def with_qwen_rules(tokenizer: Tokenizer) -> Tokenizer:
    """Set normalizer, pre-tokenizer and decoder."""
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED_TOKENS])


def _training_text():
    """Documents without control tokens, then each label alone, with and without a space before it."""
    for number in TRAINING_DOCUMENTS:
        text = document(number)
        for token in ADDED_TOKENS:
            text = text.replace(token, "\n")
        yield text
    for label in all_labels():
        yield from [f"{label}\n {label}\n"] * LABEL_WEIGHT


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise ValueError unless the vocabulary has its size, every byte has a token and every label is one token."""
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    vocabulary = tokenizer.get_vocab()
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
    split = [label for label in all_labels() if len(answer_ids(tokenizer, label)) != 1]
    if missing or split:
        raise ValueError(f"bytes without a token: {missing}; labels of several tokens: {split}")


def answer_ids(tokenizer: Tokenizer, label: str) -> list[int]:
    """The tokens of an answer, encoded where answers stand: directly after the assistant's header."""
    header = "<|im_start|>assistant\n"
    return tokenizer.encode(header + label).ids[len(tokenizer.encode(header).ids) :]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at `path`, trained and saved there first if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))
