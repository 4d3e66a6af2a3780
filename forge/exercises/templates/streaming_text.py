"""Exercise 12: text from tokens while they come: whole characters, and stop strings.

Read chapter 9 first (forge serving). A token is bytes, and a character may begin in one token and end in the next. A
stop string may do so too. What has been sent to a client cannot be taken back: so text is shown as soon as it is
certain, and never sooner.

    tokens     b"caf" b"\\xc3" b"\\xa9 <" b"en" b"d>"        stop  "<end>"
    shown       caf     (wait)  é·        (wait)  (stop)

Fill in the three functions. Then:

    forge build check 12     every way to cut texts into tokens
    forge build run 12       the engine, with your text
"""

from collections.abc import Sequence


def whole_characters(data: bytes) -> tuple[str, bytes]:
    """Return the text of `data`, and the bytes at its end that may still become a character, which are not in the text.

    UTF-8: a character takes 1 to 4 bytes. Bytes that can never become a character are U+FFFD in the text, as many as
    `data.decode("utf-8", errors="replace")` makes of them.
    """
    raise NotImplementedError("whole_characters")


class MyText:
    """One output's text as it grows. `stopped_by` is the stop string that was found, None before."""

    def __init__(self, stop: Sequence[str] = ()):
        self.stop = tuple(stop)  # none of them is empty
        self.stopped_by: str | None = None
        self.held_bytes = b""  # may still become a character
        self.held_text = ""  # a stop string may begin in it

    def push(self, token: bytes) -> str:
        """Take one more token; return all text that is certain now, which may be "". `token` may be b"".

        Text is certain once no stop string can begin in it any more. If several stop strings are in the text, the one
        that ends first has been found, and of those that end at the same place the longest. The text before it is
        returned, neither it nor anything after it is ever shown, and `stopped_by` names it. The time of a call must not
        grow with the text that was shown before.
        """
        raise NotImplementedError("push")

    def finish(self) -> str:
        """End the text: return what was held back. Bytes of half a character become U+FFFD, as `decode` has it.

        After a stop string it is "".
        """
        raise NotImplementedError("finish")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
