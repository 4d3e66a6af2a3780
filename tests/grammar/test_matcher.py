"""A matcher is a function of the tokens alone, whatever it was asked before."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from forge.engine.structured_output import MatcherError, StructuredOutput
from forge.grammar.compiler import GrammarCompiler
from forge.grammar.matcher import CompiledGrammar
from forge.grammar.vocabulary import Vocabulary, ll_tokenizer
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


class Recorded:
    """A parser that notes what is asked of it."""

    def __init__(self, parser):
        self.parser, self.calls = parser, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return getattr(self.parser, name)(*arguments)

        return call

    def take_calls(self, *names):
        """Return the calls since the last time, those of these names that did something."""
        calls, self.calls = self.calls, []
        return [call for call in calls if call[0] in names and call[1:] not in (([],), (0,))]


@pytest.fixture
def recorded(grammar):
    """A matcher whose parser's calls are noted."""
    matcher = grammar.new_matcher()
    matcher._parser = Recorded(matcher._parser)
    return matcher


def test_the_parser_walks_only_what_differs(recorded, output):
    """Whoever asks twice, or for one token more, pays for that alone; tuples are texts as lists are."""
    parser, walk = recorded._parser, ("try_consume_tokens", "rollback", "reset", "compute_bitmask")
    recorded.mask(tuple(output[:3]))
    assert parser.take_calls(*walk) == [("try_consume_tokens", output[:3]), ("compute_bitmask",)]
    recorded.mask(output[:4])
    assert parser.take_calls(*walk) == [("try_consume_tokens", output[3:4]), ("compute_bitmask",)]
    recorded.mask(output[:4])
    assert parser.take_calls(*walk) == []
    recorded.mask(tuple(output[:3]))
    assert parser.take_calls(*walk) == [("rollback", 1)]
    assert recorded.num_allowed(output[:3], output[3:6]) == 3
    assert parser.take_calls(*walk) == []


def test_a_mask_is_kept_for_as_long_as_its_text_stands(recorded, output):
    computed = lambda: len(recorded._parser.take_calls("compute_bitmask"))  # noqa: E731
    for length in (3, 4, 5):
        recorded.mask(output[:length])
    assert computed() == 3
    recorded.mask(output[:4])
    recorded.mask(output[:3])
    assert computed() == 0
    recorded.mask(output[:5])
    assert computed() == 1, "the text was cut before it"


def test_masks_of_sixteen_positions_are_kept_at_most(recorded, output):
    """One takes a byte for each token of the vocabulary."""
    for length in range(len(output)):
        recorded.mask(output[:length])
        assert len(recorded._masks) <= 16
    recorded._parser.take_calls()
    for _ in range(2):  # the last of them are there
        recorded.mask(output[: len(output) - 1])
    assert recorded._parser.take_calls("compute_bitmask") == []


def test_after_an_interruption_no_mask_of_another_text_is_given(grammar, output):
    """Wherever Ctrl-C comes: here once the parser has taken tokens back, and before it has consumed the new ones."""

    def interrupt(token_ids):
        raise KeyboardInterrupt

    matcher = grammar.new_matcher()
    texts = [output[:5], *([*output[:4], int(other)] for other in np.flatnonzero(matcher.mask(output[:4])))]
    fresh = [grammar.new_matcher().mask(text) for text in texts]
    other = next(index for index, mask in enumerate(fresh) if not np.array_equal(mask, fresh[0]))
    matcher.mask(output[:5])
    parser, matcher._parser = matcher._parser, Recorded(matcher._parser)
    matcher._parser.try_consume_tokens = interrupt
    with pytest.raises(KeyboardInterrupt):
        matcher.mask(output[:6])
    matcher._parser = parser
    assert np.array_equal(matcher.mask(texts[other]), fresh[other])


def test_a_mask_with_a_single_token_of_a_large_vocabulary(compiler, tokenizer):
    """Where next to nothing may come, most of the mask is not even looked at."""
    token_ids = tokenizer.encode("fox and owl", add_special_tokens=False)
    matcher = compiler(StructuredOutput(choice=["fox and owl"])).new_matcher()
    for length, token_id in enumerate(token_ids):
        mask = matcher.mask(token_ids[:length])
        assert mask.dtype == bool and len(mask) == tokenizer.vocab_size
        expected = {other for other in np.flatnonzero(mask) if matcher.num_allowed(token_ids[:length], [int(other)])}
        assert set(np.flatnonzero(mask)) == expected and mask[token_id]


def test_the_end_is_forced_only_where_nothing_else_may_come():
    tokenizer = ByteTokenizer()
    matcher = GrammarCompiler(tokenizer, 259)(StructuredOutput(regex="a(bc)?d?")).new_matcher()
    end = (min(tokenizer.eos_token_ids),)
    assert [matcher.forced(list(text)) for text in (b"", b"a", b"ab", b"abc", b"abcd", b"ad", b"b")] == [
        (ord("a"),),
        (),
        (ord("c"),),
        (),
        end,
        end,
        (),
    ]


def test_text_that_no_token_can_write_is_an_error():
    tokens = [bytes([byte]) if byte != ord("z") else b"" for byte in range(256)]
    vocabulary = Vocabulary([*tokens, b"</s>"], [256], frozenset({256}))
    parser = LLMatcher(ll_tokenizer(vocabulary), LLMatcher.grammar_from_regex("az"))
    matcher = CompiledGrammar(parser, vocabulary.eos_token_ids, 257).new_matcher()
    assert np.flatnonzero(matcher.mask([])).tolist() == [ord("a")]
    with pytest.raises(MatcherError, match="no token of this model's vocabulary"):
        matcher.mask([ord("a")])


@pytest.mark.parametrize("ask", ["mask", "forced"])
def test_what_the_tokenizer_raises_while_the_parser_asks_it_is_raised(ask, tokenizer, monkeypatch):
    """The parser swallows it. The next question is answered as if nothing had been."""
    compiler, num_raised = GrammarCompiler(tokenizer, tokenizer.vocab_size), 0
    structured = StructuredOutput(json=SCHEMA)
    grammar, output = compiler(structured), tokenizer.encode(TEXT, add_special_tokens=False)

    def interrupt(text):
        raise KeyboardInterrupt

    for length in range(len(output)):
        matcher = grammar.new_matcher()
        matcher.mask(output[:length])
        with monkeypatch.context() as patched:
            patched.setattr(grammar.encode, "_encode", interrupt)
            try:
                getattr(matcher, ask)(output[: length + 1])
            except KeyboardInterrupt:
                num_raised += 1
        assert not grammar.encode.has_raised
        expected = grammar.new_matcher().mask(output[: length + 1])
        assert np.array_equal(matcher.mask(output[: length + 1]), expected)
    assert num_raised


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


def test_a_mask_is_read_only(grammar, output):
    for text in ([], output):
        with pytest.raises(ValueError, match="read-only"):
            grammar.new_matcher().mask(text)[0] = True


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


def test_all_sequences_of_a_used_up_grammar_say_so(tokenizer):
    """They share its states: one that is only now moved to its text finds none left."""
    compiler = GrammarCompiler(ByteTokenizer(), 259)
    grammar = compiler(StructuredOutput(regex="a([ab]{0,99}a[ab]{0,50}){40,50}"))
    matcher, output = grammar.new_matcher(), []
    with pytest.raises(MatcherError, match="more work"):
        while True:
            output.append(int(np.flatnonzero(matcher.mask(output))[0]))
    for late in (matcher, grammar.new_matcher()):
        with pytest.raises(MatcherError, match="more work"):
            late.mask(output)
        assert late.num_allowed(output, [ord("a")]) == 0 and late.forced(output) == ()


def test_a_text_that_takes_too_much_work_to_walk_says_so():
    compiler, rng = GrammarCompiler(ByteTokenizer(), 259), random.Random(0)
    grammar = compiler(StructuredOutput(regex="a([ab]{0,99}a[ab]{0,50}){40,50}"))
    with pytest.raises(MatcherError, match="more work"):
        grammar.new_matcher().mask([ord("a"), *(rng.choice(b"ab") for _ in range(3000))])
    assert grammar.is_spent


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
