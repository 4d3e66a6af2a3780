"""A matcher is a function of the tokens alone, whatever it was asked before."""

import random

import numpy as np
import pytest

from forge.engine.structured_output import MatcherError, StructuredOutput
from forge.grammar.compiler import GrammarCompiler
from forge.tokenizer.byte_tokenizer import ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"hero": {"type": "string"}, "mood": {"enum": ["happy", "sad"]}, "age": {"type": "integer"}},
    "required": ["hero", "mood", "age"],
    "additionalProperties": False,
}
TEXT = '{"hero": "Mia 🦊 \\n", "mood": "sad", "age": 7}'


@pytest.fixture(scope="module")
def grammar(compiler):
    return compiler(StructuredOutput(json=SCHEMA))


@pytest.fixture(scope="module")
def output(tokenizer):
    return [*tokenizer.encode(TEXT, add_special_tokens=False), max(tokenizer.eos_token_ids)]


def test_a_mask_allows_what_the_whole_walk_allows(grammar, output):
    matcher = grammar.new_matcher()
    for length, token_id in enumerate(output):
        assert matcher.mask(output[:length])[token_id]
        assert matcher.num_allowed(output[:length], output[length:]) == len(output) - length
        assert matcher.num_allowed(output[:length], output[length:-1]) == len(output) - 1 - length
        assert matcher.num_allowed(output[:length], output[-1:]) == (length == len(output) - 1)


def test_masks_do_not_depend_on_what_was_asked_before(grammar, output):
    """Jumps between beginnings and wrong turns, as after rejected draft tokens, a preemption or a fork."""
    fresh = [grammar.new_matcher().mask(output[:length]) for length in range(len(output) + 1)]
    matcher, rng = grammar.new_matcher(), random.Random(0)
    for _ in range(300):
        length = rng.randrange(len(output) + 1)
        if rng.random() < 0.5:
            allowed = np.flatnonzero(matcher.mask(output[:length]))
            matcher.num_allowed(output[:length], [rng.randrange(len(fresh[0])) for _ in range(4)])
            matcher.forced(output[:length])
            matcher.mask([*output[:length], int(rng.choice(allowed))])
            length = rng.randrange(len(output) + 1)
        assert np.array_equal(matcher.mask(output[:length]), fresh[length])


def test_num_allowed_agrees_with_the_masks(grammar, output):
    matcher, rng = grammar.new_matcher(), random.Random(1)
    for _ in range(200):
        length = rng.randrange(len(output))
        tail = [*output[length : length + rng.randrange(6)], rng.randrange(4096), rng.randrange(4096)]
        expected = 0
        while expected < len(tail) and matcher.mask([*output[:length], *tail[:expected]])[tail[expected]]:
            expected += 1
        if any(one in grammar.eos_token_ids for one in tail[:expected]):  # nothing needs to follow an end
            expected = next(index for index, one in enumerate(tail) if one in grammar.eos_token_ids) + 1
        assert matcher.num_allowed(output[:length], tail) == expected


def test_an_interruption_within_the_library_does_no_harm(grammar, output):
    class Interrupted:
        """The parser, interrupted after it has consumed."""

        def __init__(self, parser):
            self.parser, self.armed = parser, False

        def __getattr__(self, name):
            return getattr(self.parser, name)

        def try_consume_tokens(self, token_ids):
            moved = self.parser.try_consume_tokens(token_ids)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return moved

    matcher = grammar.new_matcher()
    matcher._parser = Interrupted(matcher._parser)
    matcher.mask(output[:3])
    matcher._parser.armed = True
    with pytest.raises(KeyboardInterrupt):
        matcher.mask(output[:6])
    assert np.array_equal(matcher.mask(output[:5]), grammar.new_matcher().mask(output[:5]))


def test_matchers_of_one_grammar_are_independent(grammar, output):
    one, other = grammar.new_matcher(), grammar.new_matcher()
    one.mask(output[:9])
    assert np.array_equal(other.mask([]), grammar.new_matcher().mask([]))


def test_control_tokens_and_padding_never_match_text(tokenizer):
    padded = GrammarCompiler(tokenizer, tokenizer.vocab_size + 7)
    mask = padded(StructuredOutput(regex=r"(.|\n)+")).new_matcher().mask([])
    hidden = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_hidden(token_id)]
    assert len(mask) == tokenizer.vocab_size + 7
    assert not mask[hidden].any() and not mask[tokenizer.vocab_size :].any()
    after_text = padded(StructuredOutput(regex=r"(.|\n)*")).new_matcher().mask([])
    assert set(np.flatnonzero(after_text[hidden])) == {hidden.index(one) for one in tokenizer.eos_token_ids}


def test_the_text_of_a_control_token_is_text(compiler, tokenizer):
    name = tokenizer.spec.tokens[tokenizer.spec.control_ids[0]]
    matcher = compiler(StructuredOutput(choice=[name])).new_matcher()
    assert not matcher.mask([])[tokenizer.spec.control_ids].any()
    assert matcher.mask([])[tokenizer.encode(name, add_special_tokens=False)[0]]


def test_every_token_is_its_bytes():
    """Parts of characters are tokens too, and bytes that are in no character never come."""
    tokenizer = ByteTokenizer()
    matcher = GrammarCompiler(tokenizer, 259)(StructuredOutput(regex="[é🦊]{2}")).new_matcher()
    allowed, token_ids = [], list("é🦊".encode())
    for length in range(len(token_ids) + 1):
        allowed.append(set(np.flatnonzero(matcher.mask(token_ids[:length])).tolist()))
    assert allowed[0] == allowed[2] == {0xC3, 0xF0} and allowed[1] == {0xA9} and allowed[3] == {0x9F}
    assert allowed[-1] == set(tokenizer.eos_token_ids)
    anything = GrammarCompiler(tokenizer, 259)(StructuredOutput(regex="(.|\n)*")).new_matcher().mask([])
    assert not anything[[0x80, 0xC0, 0xFE, 0xFF]].any()


def test_forced_text_is_proposed_as_the_tokenizer_writes_it(grammar, tokenizer):
    matcher = grammar.new_matcher()
    forced = matcher.forced([])
    assert '{"hero": "'.startswith(tokenizer.decode(forced)) and len(forced) >= 3
    assert matcher.num_allowed([], forced) == len(forced)
    text = tokenizer.encode('{"hero": "Mia", "mood": "sad", "age": 7}', add_special_tokens=False)
    assert matcher.forced(text) == (min(tokenizer.eos_token_ids),)
    assert matcher.forced([*text, min(tokenizer.eos_token_ids)]) == ()


def test_what_follows_the_end_is_free_and_no_draft_token_goes_there(grammar, output):
    """Verification may look at a row after the end; the engine drops what it gives."""
    matcher = grammar.new_matcher()
    assert matcher.mask(output).all()
    assert matcher.num_allowed(output, output[:1]) == 0


def test_an_output_outside_the_grammar_is_an_error(grammar, output):
    matcher = grammar.new_matcher()
    with pytest.raises(MatcherError, match="does not follow its grammar"):
        matcher.mask([output[2], output[2]])
    assert matcher.num_allowed([output[2], output[2]], output[:1]) == 0
    assert matcher.mask([])[output[0]]


def test_a_mask_is_read_only(grammar):
    with pytest.raises(ValueError, match="read-only"):
        grammar.new_matcher().mask([])[0] = True


def test_a_grammar_that_is_used_up_is_compiled_again(tokenizer):
    structured = StructuredOutput(regex="a([ab]{0,99}a[ab]{0,50}){40,50}")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def num_tokens() -> int:
        matcher, output = compiler(structured).new_matcher(), []
        with pytest.raises(MatcherError, match="more work"):
            while True:
                output.append(int(np.flatnonzero(matcher.mask(output))[0]))
        return len(output)

    assert num_tokens() == num_tokens() > 10


def test_of_a_long_forced_text_only_the_beginning_is_tokenized(tokenizer, monkeypatch):
    """Each time: otherwise a choice of 64,000 characters takes 20 ms per mask."""
    rng = random.Random(0)
    text = " ".join(rng.choice(("fox", "owl", "zq", "ünï", "1234", "  x")) for _ in range(600))
    lengths, encode = [], tokenizer.encode
    expected = encode(text, add_special_tokens=False)

    def counted(text: str, **options) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size)(StructuredOutput(choice=[text])).new_matcher()
    for length in (0, 1, 99, 100, 500, len(expected) - 70, len(expected) - 1):
        output = expected[:length]
        allowed, forced = np.flatnonzero(matcher.mask(output)), matcher.forced(output)
        assert forced == tuple(expected[length:][: len(forced)]) and allowed.tolist() == [forced[0]]
        assert length or len(forced) > 64, "many at once"
    assert max(lengths) <= 512 < len(text)
