"""The colours of every screen, by what they mean. No view names a colour itself.

One accent, one colour per sequence, grey for what is free or in the background, red only for trouble.
"""

ACCENT = "cyan"
QUIET = "grey50"
TROUBLE = "red"
GOOD = "green"
TITLE = "bold"

_SEQUENCES = ("cyan", "yellow", "magenta", "green", "blue")


def sequence_style(index: int) -> str:
    """Return the colour of the `index`-th sequence on a screen; they repeat after five."""
    return _SEQUENCES[index % len(_SEQUENCES)]
