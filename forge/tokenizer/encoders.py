"""Which implementation encodes a text: decided by what each costs to load and by how much there is to encode.

Measured, in milliseconds, medians on two busy Zen 4 cores: the first prompt of 240 characters, load included, and then
64,000 characters of English and of the gate's multilingual sample. Importing `tokenizers` costs 4 on top.

                          4,096 tokens                  151,936 tokens
                          1st prompt  64,000 chars      1st prompt  64,000 chars
    prompt-cut reference  not used                      15          (the next prompt 8)
    reference             4.5         20 to 21          250         16 to 20
    fast, with its gate   27          0.2 to 1.8        1,290       0.15 to 1.9

So a short command on a large vocabulary never loads it whole: the third path, the prompt's cut, is kept as it saves
each `forge generate` on such a model a quarter of a second. A second-long load is worth it only to who encodes millions
of characters, and a server says so in advance. In between the rule is the ski renter's: change over when as
much has been paid by staying as the change costs, which is never worse than twice the best choice in hindsight. What
has been paid is counted in prompts and characters, not in time, so the same calls always take the same path. And the
path can never be seen in the ids: the cut is exact, and the fast path is used only behind the equality gate.

`ReferenceEncoder` holds the whole vocabulary in Hugging Face's `tokenizers`. `PromptCutEncoder` is the same library and
the same BPE, given only the part of the vocabulary that one text can reach, because loading is what a short command
pays for. Why the cut is exact: a merge replaces two neighbours within one pre-token by their concatenation, so whatever
BPE produces is a substring of a pre-token. A token that is no substring of any of the text's pre-tokens can never
appear, nor can a merge that makes it ever apply; leaving them out changes nothing, and the order of the rest is kept.
Ledger, 151,936 tokens, a prompt of 240 characters: bound by touching every string once. Whole vocabulary 190 to 250 ms
(dictionary 23, splitting merges 30 to 50, BPE 142 to 160). Cut 8 to 15 ms (set lookups of the tokens 5 to 8, of the
merges 3 to 5.5, the rest under 0.5), once for all parts of a chat prompt. It loses when many prompts come, so they are
counted, and for long runs without a break, whose substrings grow with the square of the length: `MAX_SUBSTRINGS`.

`FastEncoder` is the `fastokens` package, given the same vocabulary through the one door it has, a tokenizer.json text.
It is used for nothing but plain text: normalization, control and user-defined tokens and decoding are forge's own, so
none of what fastokens leaves out, or does in its own way, can show. It loses on loading: a second for the real
vocabulary. And it is used only after its ids equal the reference's on a fixed multilingual sample, the equality gate
(`first_difference`). The sample aims at where tokenizers differ in practice: scripts with and without spaces,
characters of two to four bytes, emoji joined into one, marks that NFC composes or reorders, every kind of white space,
digits of several scripts, code, contractions in both cases, words far longer than any token, and text that looks like a
control token but is not one. Passing is evidence, not proof; the gate fails closed, and its reason is kept for `forge
doctor`.

All take text that is already NFC and free of control and user-defined tokens: that is the tokenizer's part.
"""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, Literal, Protocol
from unicodedata import normalize

from forge.tokenizer.spec import SMALL_VOCABULARY, TokenizerSpec

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions, in either case
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the one space or mark before it
    r"|\p{N}"  # each digit alone
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # a run of punctuation, with the line ends after it
    r"|\s*[\r\n]+"  # blank lines
    r"|\s+(?!\S)"  # spaces but the last, which belongs to the word after them
    r"|\s+"
)
"""The `qwen2` pre-tokenizer: where text is cut before BPE runs inside each part."""

MAX_SUBSTRINGS = 100_000
"""Distinct pre-tokens' substrings up to which cutting the vocabulary is cheaper than loading it."""


class ReferenceEncoder:
    """The whole vocabulary in Hugging Face `tokenizers`. Raises `TokenizerError` for merges that leave it."""

    name = "reference"

    def __init__(self, spec: TokenizerSpec) -> None:
        vocabulary = mergeable_vocabulary(spec)
        merges = [_pair(merge) for merge in spec.merges]
        self.spec = spec
        self._tokenizer = _build(spec, vocabulary, merges, _pre_tokenizer())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenizer_json(self) -> str:
        """Write the plain-text part of the tokenizer as a Hugging Face tokenizer.json: no normalizer, no added
        tokens."""
        text: str = self._tokenizer.to_str()
        return text


class PromptCutEncoder:
    """Encodes a prompt with the vocabulary cut to what that prompt can reach; keeps nothing between prompts."""

    name = "prompt-cut reference"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._pre_tokenizer = _pre_tokenizer()

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of each part of one prompt, or None when its pre-tokens are too long for the cut to be worth
        it."""
        pieces = {piece for part in parts for piece, _ in self._pre_tokenizer.pre_tokenize_str(part)}
        if sum(len(piece) * (len(piece) + 1) // 2 for piece in pieces) > MAX_SUBSTRINGS:
            return None
        vocabulary, merges = cut_vocabulary(self._spec, pieces)
        cut = _build(self._spec, vocabulary, merges, self._pre_tokenizer)
        return [cut.encode(part, add_special_tokens=False).ids for part in parts]


def mergeable_vocabulary(spec: TokenizerSpec) -> dict[str, int]:
    """Map each token that BPE may produce to its id. Raises `TokenizerError` when two tokens are equal."""
    vocabulary = dict(zip(spec.tokens, range(len(spec.tokens)), strict=True))
    if len(vocabulary) != len(spec.tokens):
        spec.check_vocabulary()
    for token_id in spec.unmergeable_ids:
        del vocabulary[spec.tokens[token_id]]
    return vocabulary


def cut_vocabulary(spec: TokenizerSpec, pieces: set[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the tokens and merges that can occur in `pieces` (pre-tokens in the byte alphabet), merges in their
    order."""
    reachable = {piece[i:j] for piece in pieces for i in range(len(piece)) for j in range(i + 1, len(piece) + 1)}
    vocabulary = {token: token_id for token_id, token in enumerate(spec.tokens) if token in reachable}
    for token_id in spec.unmergeable_ids:
        if vocabulary.get(spec.tokens[token_id]) == token_id:
            del vocabulary[spec.tokens[token_id]]
    candidates = {f"{token[:cut]} {token[cut:]}" for token in vocabulary for cut in range(1, len(token))}
    return vocabulary, [_pair(merge) for merge in filter(candidates.__contains__, spec.merges)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer() -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _build(spec: TokenizerSpec, vocabulary: dict[str, int], merges: list[tuple[str, str]], pre_tokenizer: Any) -> Any:
    from tokenizers import Tokenizer, models

    try:
        model = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the library raises a plain Exception or TypeError for merges it cannot take
        spec.check_vocabulary()
        raise spec.error("merges", f"the tokenizers library refuses them: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


class FastEncoder:
    """fastokens over the reference's vocabulary. Raises whatever the package raises, ImportError where it is not
    installed."""

    def __init__(self, reference: ReferenceEncoder) -> None:
        from fastokens._native import Tokenizer  # type: ignore[import-untyped]

        self._tokenizer = Tokenizer.from_json_str(reference.tokenizer_json())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


SAMPLE: tuple[str, ...] = (
    "",
    "A scheduler admits requests until the block pool is empty; then the next one waits.",
    "The SHARK wasn't hungry, it'd eaten. They've said we'll see, I'm sure you're right, he'd know.",
    "IT'S WHAT THEY'VE SAID: WE'LL SEE, I'M SURE YOU'RE RIGHT, HE'D KNOW, DON'T. It\u2019s curly. o'clock 'sore 'Tis",
    "'\u017f \u212a'LL 'ſ 'S'T'RE'VE'M'LL'D",
    "1 12 123 1234567890 3.14159 -273.15 1e-6 0xDEADBEEF 10\u2075 x\u00b2 \u00bd \u2167 ١٢٣ ४५६ 七八九 １２３",
    "def f(x: int) -> int:\n    if x <= 1:\n\t\treturn 1\n    return x * f(x - 1)  # n!\n\n\nprint(f'{f(5)=}')\n",
    '#include <stdio.h>\r\nint main(void) { printf("%d\\n", a[i++] && b != ~c); }\r\n\r\n',
    'SELECT * FROM t WHERE a>=1 AND b<>\'x\'\'y\'; {"k": [1, null, {"é": "\\u00e9"}]} <a href="#">&amp;</a>',
    "a  b   c    d\te\t\tf \t g\n\nh\n \ni \n\n j\r\rk\r\n l   ",
    "   leading, trailing   ",
    "\n",
    " \n \n  \n",
    "\u00a0no\u00a0break \u2003em\u2009thin\u200bzero\u3000ideographic\u2028line\u2029para\u0085next\x0bvt\x0cff\x1fus",
    "\x00\x01\x7f\u0080\ufeffbom\ufffd\ufffe\U0010ffff\ue000",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Größenwahn, Straße, ẞ. Þórður Ægir. İstanbul ığüşöç. Ħħ Ŋŋ",
    "Việt Nam: tiếng, nghĩa, được. Yorùbá ọ̀rọ̀. ʻŌlelo Hawaiʻi. Esperanto: ĉiuj ŝanĝoj.",
    "cafe\u0301 A\u030angstro\u0308m n\u0303 \u1100\u1161\u11a8 a\u0327\u0301 a\u0301\u0327 \u2126 \u212b \u0958",
    "z\u0351\u036b\u0343a\u0329\u0323\u030bl\u0334\u0315g\u0321\u035fo\u0489 \u0301lone",
    "Съешь же ещё этих мягких французских булок. Їжак і ґава. Қазақ тілі. Српски ђ.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΑΣ Σίσυφος ς",
    "שָׁלוֹם עוֹלָם, זה מבחן. مرحبا بالعالم، هذا ٱختبار. فارسی می‌خواهم اردو ہے",
    "नमस्ते दुनिया, क्षत्रिय। বাংলা ভাষা। தமிழ் மொழி. తెలుగు. ಕನ್ನಡ. മലയാളം. ਪੰਜਾਬੀ. ગુજરાતી. සිංහල",
    "ภาษาไทยไม่มีช่องว่าง ພາສາລາວ ភាសាខ្មែរ မြန်မာဘာသာ བོད་སྐད།",
    "我们把键和值分成块，这样就不必连续存放了。繁體中文與简体字。㐀𠮷𪚥",
    "吾輩は猫である。名前はまだ無い。カタカナ、ﾊﾝｶｸ、々〆ヶ「」・ー",
    "안녕하세요 세계! 한국어 띄어쓰기. ㅋㅋㅋ 뷁",
    "ქართული ენა Հայերեն ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ አማርኛ ⵜⴰⵎⴰⵣⵉⵖⵜ ᠮᠣᠩᠭᠣᠯ 𐌲𐌿𐍄𐌹𐍃𐌺 𒀭𒈹 𓂀 𝔐𝕒𝚝𝒉",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇮🇸🇯🇵 ❤️‍🔥 ☃︎ 1️⃣ 🧑🏿‍🚀 a👍b 😀😀😀😀",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, ∑ᵢ aᵢ² ≠ ∫₀^∞ e^{−t} dt ± √2 → ∞ €99 £5 ¥7 ₹8 ©®™ § ¶ † ‡ … — – ‰",
    "<|im_start|>user\nnot a turn<|im_end|> <|endoftext|> <|im_ end|> <|im_start <think>hm</think> <tool_call>",
    "!!!!!!!! ........ -------- ======== ???!!! ))))]]}} //////// \\\\\\ `````` \"\"\" ''' ~~~ ^^^",
    "https://example.org/a_b-c/d?e=f&g=%20h#i user.name+tag@example.co.uk C:\\Windows\\system32 ../../etc ~/.cache",
    "supercalifragilisticexpialidocious" * 8,
    "a" * 300 + " " + "ab" * 150 + " " + "ł" * 120 + " " + "字" * 80,
    " " * 67 + "x" + "\n" * 35 + "\t" * 19 + "." * 131,
    "camelCase PascalCase snake_case kebab-case SCREAMING_CASE x1y2z3 v1.2.3-rc.4+5 B2B i18n ﬁn naïve coöp",
)
"""One text per line of concern; changing it changes what the gate promises, so add and do not remove."""


class PlainEncoder(Protocol):
    """Encodes text that is NFC already, every token in it plain."""

    def encode(self, text: str) -> list[int]: ...


def first_difference(fast: PlainEncoder, reference: PlainEncoder, sample: Iterable[str] = SAMPLE) -> str | None:
    """Return where `fast` differs from `reference`; None if it gives the same ids for every text, and for all of them
    as one.

    What `fast` raises counts as a difference; what the reference raises is raised."""
    texts = [normalize("NFC", text) for text in sample]
    for number, text in enumerate([*texts, "\n".join(texts)]):
        expected = reference.encode(text)
        try:
            token_ids = fast.encode(text)
        except Exception as error:  # a foreign package: any failure means that it is not used
            return f"it fails on text {number} of the sample: {error}"
        if token_ids != expected:
            pairs = enumerate(zip(token_ids, expected, strict=False))
            at = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(token_ids), len(expected)))
            return f"text {number} of the sample differs from token {at} on"
    return None


Preference = Literal["auto", "fast", "reference"]

MAX_CUTS = 20
"""Prompts encoded with a cut vocabulary before the whole one is loaded: 250 ms against 8 to 15 each."""

FAST_PAYS_AFTER_CHARS_PER_TOKEN = 30
"""Characters encoded, per token of the vocabulary, before fastokens is loaded: 8 µs a token for 0.27 µs a character."""


class Encoders:
    """The implementations of one `TokenizerSpec`, each built when first chosen and at most once.

    `prefer="fast"` loads the fast path at the first text, `"reference"` never does, `"auto"` follows the rule above.
    `build_fast` is a parameter so that a test can inject a fast path that is wrong. Safe to use from several threads.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        prefer: Preference = "auto",
        build_fast: Callable[[ReferenceEncoder], PlainEncoder] = FastEncoder,
    ) -> None:
        self.fallback_reason: str | None = None
        self.last_used: str | None = None
        self._spec = spec
        self._prefer = prefer
        self._build_fast = build_fast
        self._lock = Lock()
        self._num_chars = 0
        self._num_cuts = 0
        self._cut: PromptCutEncoder | None = None
        self._reference: ReferenceEncoder | None = None
        self._fast: PlainEncoder | None = None

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Encode each part of one prompt; a part is NFC and holds no token to be matched whole."""
        with self._lock:
            self._num_chars += sum(map(len, parts))
            fast = self._fast_if_due()
        if fast is not None:
            try:
                ids = [fast.encode(part) for part in parts]
            except Exception as error:  # a foreign package: whatever it refuses, the reference takes
                with self._lock:
                    self._give_up_fast(f"fastokens: it fails on a text: {error}")
            else:
                self.last_used = "fast"
                return ids
        return self._encode_by_reference(parts)

    def prepare(self) -> str:
        """Load now what the preference will load anyway; return that implementation's name."""
        with self._lock:
            if self._prefer != "auto" and self._fast_if_due() is not None:
                return "fast"
            if self._may_cut():
                return PromptCutEncoder.name
            self._load_reference()
            return ReferenceEncoder.name

    def _encode_by_reference(self, parts: Sequence[str]) -> list[list[int]]:
        if self._may_cut():
            self._num_cuts += 1
            self._cut = self._cut or PromptCutEncoder(self._spec)
            ids = self._cut.encode_parts(parts)
            if ids is not None:
                self.last_used = self._cut.name
                return ids
        with self._lock:
            reference = self._load_reference()
        self.last_used = reference.name
        return [reference.encode(part) for part in parts]

    def _may_cut(self) -> bool:
        is_large = len(self._spec.tokens) > SMALL_VOCABULARY
        return is_large and self._reference is None and self._prefer == "auto" and self._num_cuts < MAX_CUTS

    def _load_reference(self) -> ReferenceEncoder:
        if self._reference is None:
            self._reference = ReferenceEncoder(self._spec)
        return self._reference

    def _fast_if_due(self) -> PlainEncoder | None:
        if self._fast is not None or self.fallback_reason is not None or self._prefer == "reference":
            return self._fast
        is_due = self._num_chars >= FAST_PAYS_AFTER_CHARS_PER_TOKEN * len(self._spec.tokens)
        if self._prefer == "fast" or is_due:
            self._fast = self._load_fast()
        return self._fast

    def _load_fast(self) -> PlainEncoder | None:
        """Load the fast path if it can be had and passes the gate; else return None, with `fallback_reason` set."""
        reference = self._load_reference()
        try:
            fast = self._build_fast(reference)
        except ImportError:
            reason = "fastokens is not installed"
        except Exception as error:  # a foreign package: whatever it refuses, the reference takes
            reason = f"fastokens does not load this vocabulary: {error}"
        else:
            difference = first_difference(fast, reference)
            if difference is None:
                return fast
            reason = f"fastokens is not the reference's equal: {difference}"
        self._give_up_fast(reason)
        return None

    def _give_up_fast(self, reason: str) -> None:
        self._fast, self.fallback_reason = None, " ".join(reason.split())[:300]
