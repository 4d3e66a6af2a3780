"""The equality gate: fast ids are used only after they equal the reference's on a fixed multilingual sample.

The sample aims at where tokenizers differ in practice: scripts with and without spaces, characters of two to four
bytes, emoji joined into one, marks that NFC composes or reorders, every kind of white space, digits of several scripts,
code, contractions in both cases, words far longer than any token, and text that looks like a control token but is not
one. Passing is evidence, not proof; the gate fails closed, and its reason is kept for `forge doctor`.
"""

from collections.abc import Iterable
from typing import Protocol
from unicodedata import normalize

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
            at = next((i for i, pair in enumerate(zip(token_ids, expected, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(token_ids), len(expected)) if at is None else at
            return f"text {number} of the sample differs from token {at} on"
    return None
