"""Texts and ids to try: any Unicode, and the kinds of text where tokenizers go wrong."""

from hypothesis import settings
from hypothesis import strategies as st

MODEST = settings(max_examples=150, deadline=None)

_AWKWARD = (
    *("<|im_end|>", "<|im_start|>user\n", "<think>", "</think>", "<|im_", "<think", "'s", "'LL", "\u017f", " ", "  "),
    *("\n", "\r\n", "\t", "\u00a0", "\u2003", "\u200d", "e\u0301", "\u0301", "\u0327\u0301", "A\u030a", "\u1100\u1161"),
    *(
        "👩‍👩‍👧",
        "👍🏽",
        "🇮🇸",
        "字",
        "한",
        "नि",
        "ש",
        "\x00",
        "\ufeff",
        "\ufffd",
        "\U0010ffff",
        "1",
        "١",
        "½",
        "sequence",
        "blocks",
    ),
)

any_text = st.text()
awkward_text = st.lists(st.sampled_from(_AWKWARD) | st.text(max_size=3), max_size=12).map("".join)
texts = any_text | awkward_text
plain_texts = texts.filter(lambda text: "think>" not in text)
"""Texts without a user-defined token, for which NFC is NFC of the whole."""
