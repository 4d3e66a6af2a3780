"""Exercise 13: a mask for a small grammar. Every text of a few characters, every way to cut it, masks over small
vocabularies; then the bundled model beside the engine's own grammar library."""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, product
from types import ModuleType
from typing import Any

import numpy as np

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.exercises.exercise import Costs, Driven, Exercise, Part, Trial, plain_drive, words_of
from forge.llm import LLM

GRAMMAR = 'start: list\nlist: "[" (value ("," value)*)? "]"\nvalue: NUMBER | list\nNUMBER: /[0-9]+/\n'
_ALPHABET = b"[],17 "
_VOCABULARY = (
    *b"[ ] , 0 9 12 ,1 ], ],[ [] ]] ]]] [[ ,, 1] ,[ [, a \xc3 [1,2], [1]] -1 [1,[2]] 1,[".split(),
    *(b" ", b"", b"", b"<eos>"),
)
_EOS = len(_VOCABULARY) - 1


_APART = re.compile(rb"[^][,0-9]|\[,|,[],]|[]0-9]\[|\][0-9]")
"""A byte that no list of numbers contains, or two bytes that never follow each other in one."""
_DEEPER = {ord("["): 1, ord("]"): -1}


def viable(text: bytes) -> bool:
    """Return whether some list begins with these bytes."""
    depths = list(accumulate(_DEEPER.get(byte, 0) for byte in text))  # at depth 0 the list is over
    return text[:1] in (b"", b"[") and not _APART.search(text) and all(depths[:-1])


def complete(text: bytes) -> bool:
    return viable(text) and text.count(b"[") == text.count(b"]") > 0


class MaskTrial(Trial):
    """Compares the reader's states and masks with those that follow from enumerating all lists."""

    def state(self, pieces: Sequence[bytes]) -> Any:
        """Advance the reader's state by these pieces, and check after each that it is refused exactly if no list begins
        so."""
        state, text = self.call_anew("state = piece.start()", self.piece.start), b""
        self.require(state is not None, "result", "it returned None")
        for part in pieces:
            text += part
            advanced = self.call(f"state = piece.advance(state, {part!r})", self.piece.advance, state, part)
            again = self.piece.advance(state, part)
            finding = f"it returned {advanced!r}, and then {again!r}"
            self.require((advanced is None) == (again is None), "again", finding)
            was_complete = complete(text[: len(text) - len(part)])
            rule = "nothing-follows" if was_complete else "refused" if len(pieces) == 1 else "split"
            finding = f"after {text!r} it returned {advanced!r}"
            if viable(text):
                self.require(advanced is not None, "possible" if len(pieces) == 1 else "split", finding)
            else:
                self.require(advanced is None, rule, finding)
                return None
            state = advanced
        return state

    def text(self, pieces: Sequence[bytes]) -> None:
        state, text = self.state(pieces), b"".join(pieces)
        if state is not None:
            returned = self.call("piece.is_complete(state)", self.piece.is_complete, state)
            self.require(returned in (True, False), "result", f"it returned {returned!r}")
            self.require(returned == complete(text), "complete", f"after {text!r} it returned {returned!r}")

    def mask(self, text: bytes, vocabulary: Sequence[bytes] = _VOCABULARY, eos: int = _EOS) -> None:
        state = self.state([text])
        tokens = list(vocabulary)
        mask = self.call(f"piece.mask(state, {tokens}, {eos})", self.piece.mask, state, tokens, eos)
        is_list = isinstance(mask, list | tuple | np.ndarray) and len(mask) == len(tokens)
        self.require(is_list and all(allowed in (True, False) for allowed in mask), "result", f"it returned {mask!r}")
        for token_id, (token, allowed) in enumerate(zip(tokens, mask, strict=True)):
            if token_id == eos:
                finding = f"after {text!r} the mask says {allowed} of the end"
                self.require(allowed == complete(text), "eos", finding)
            else:
                expected = token != b"" and viable(text + token)
                finding = f"after {text!r} the mask says {allowed} of token {token_id}, {token!r}"
                self.require(allowed == expected, "tokens" if token else "empty", finding)
        again = self.call("piece.mask(state, …)", self.piece.mask, state, tokens, eos)
        self.require(list(again) == list(mask), "again", "the same call has another mask")


def _check_advance(piece: ModuleType) -> None:
    trial = MaskTrial(piece)
    for length in range(5):
        for characters in product(_ALPHABET, repeat=length):
            text = bytes(characters)
            if viable(text[:-1]):
                trial.text([text])
    for text in b"[[1,[2,34]],[],5] [[[]]] [10,200,[3000]] [[],[[]],[1]] [1 []] [1]1 [[1],,".split():
        trial.text([text])
        trial.text([bytes([character]) for character in text])
        for cut in range(len(text) + 1):
            trial.text([text[:cut], text[cut:]])
            trial.text([text[:cut], b"", text[cut:]])
    random_ = random.Random(0)
    for _ in range(150):
        text = bytes(random_.choice(b"[[],1") for _ in range(12))
        trial.text([b"[", text[:4], text[4:]])
    trial.text([b"[" * 3000 + b"]" * 3000])

    def work(size: int) -> Callable[[], object]:
        return partial(piece.advance, piece.start(), b"[1," * size)

    trial.require_growth('piece.advance(piece.start(), b"[1," * 20_000)', work, 1_000, 20_000, 200)


def _check_mask(piece: ModuleType) -> None:
    trial = MaskTrial(piece)
    for text in (b"", *b"[ [1 [1, [[ [[1 [[1] [] [[] [[], [[1]] [12,[3,[4 [[[1]]".split()):
        trial.mask(text)
    trial.mask(b"[1]", [b"", b"]", b"[", b"1"], 0)
    trial.mask(b"[1", [b"]", b"2", b"", b"x"], 2)
    trial.mask(b"[1", [b"]", b"]", b"2"], 1)
    state = piece.advance(piece.start(), b"[[1")

    def work(size: int) -> Callable[[], object]:
        return partial(piece.mask, state, [b"12", b"],[", b"a"] * size, 0)

    trial.require_growth("piece.mask(state, [b'12', b'],[', b'a'] * 10_000, 0)", work, 250, 10_000, 250)


class _ReadersGrammar:
    """A `Grammar` whose masks are the reader's. It is the `Matcher` of every sequence too: it keeps no state."""

    def __init__(self, piece: ModuleType, llm: LLM):
        self.piece, self.eos_token_ids = piece, llm.tokenizer.eos_token_ids
        tokenizer, size = llm.tokenizer, llm.model.vocab_size
        known = range(min(size, tokenizer.vocab_size))
        self.vocabulary = [
            b"" if tokenizer.is_hidden(token_id) else tokenizer.token_bytes(token_id) for token_id in known
        ]
        self.vocabulary += [b""] * (size - len(self.vocabulary))

    def new_matcher(self) -> "_ReadersGrammar":
        return self

    def mask(self, output: Sequence[int]) -> np.ndarray:
        if not self.eos_token_ids.isdisjoint(output):
            return np.ones(len(self.vocabulary), bool)
        state = self.piece.start()
        for token_id in output:
            state = self.piece.advance(state, self.vocabulary[token_id])
        allowed = np.array(self.piece.mask(state, self.vocabulary, min(self.eos_token_ids)), bool)
        allowed[list(self.eos_token_ids)] = self.piece.is_complete(state)
        return allowed

    def num_allowed(self, output: Sequence[int], token_ids: Sequence[int]) -> int:
        for number, token_id in enumerate(token_ids):
            if not self.mask([*output, *token_ids[:number]])[token_id]:
                return number
        return len(token_ids)

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        return ()


def drive(llm: LLM, prompts: Sequence[str], params: SamplingParams, piece: ModuleType | None) -> Driven:
    """Run the prompts with the reader's masks."""
    if piece is not None:
        grammar = _ReadersGrammar(piece, llm)
        llm.engine.compile_grammar = lambda structured: grammar
    return plain_drive(llm, prompts, params, piece)


@cache
def _tales() -> LLM:
    return LLM("tales", kv="paged")


def _cost(piece: ModuleType | None, length: int) -> Callable[[], object]:
    from forge.grammar.compiler import GrammarCompiler

    llm = _tales()
    output = llm.tokenizer.encode("[" * length)
    compiled = GrammarCompiler(llm.tokenizer, llm.model.vocab_size)(_FORM)
    grammar: Any = _ReadersGrammar(piece, llm) if piece else compiled
    return lambda: grammar.new_matcher().mask(output)


_FORM = StructuredOutput(grammar=GRAMMAR)

EXERCISE = Exercise(
    **words_of("grammar_mask"),
    parts=(
        Part(("start", "advance", "is_complete"), _check_advance),
        Part(("start", "advance", "is_complete", "mask"), _check_mask),
    ),
    costs=Costs("mask after {} brackets", (1, 5, 17), _cost),
    options={"kv": "paged"},
    drive=drive,
    prompts=("The numbers of the house are", "The list:"),
    params=({"max_tokens": 24, "temperature": 0.9, "seed": 5, "structured": _FORM},),
)
