"""The thinking part of an answer and the rest, told apart as the text grows."""

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Splits text, as it comes, into reasoning and answer, without the tags and the blank lines beside them.

    Only an answer that begins with `<think>` has reasoning; one whose prompt ended with the tag begins inside it. What
    may be the beginning of a tag is held back, so it does not matter how the text is cut.
    """

    def __init__(self, inside: bool = False):
        self._state = "reasoning" if inside else "undecided"
        self._held = ""
        self._at_start = True
        """Blank lines at the beginning of a part are left out."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, answer) that `text` makes certain."""
        self._held += text
        reasoning = ""
        if self._state == "undecided":
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._state, self._held = "reasoning", start[len(OPEN) :]
            elif OPEN.startswith(start):
                return "", ""
            else:
                self._state, self._at_start = "answer", False
        if self._state == "reasoning":
            before, tag, after = self._held.partition(CLOSE)
            if not tag:
                return self._reasoning_so_far(), ""
            reasoning = (before.lstrip("\n") if self._at_start else before).rstrip("\n")
            self._state, self._held, self._at_start = "answer", after, True
        return reasoning, self._answer_so_far()

    def finish(self) -> tuple[str, str]:
        """Return what was held back: nothing follows."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return held.lstrip("\n") if self._at_start else held, ""
        return "", held

    def _reasoning_so_far(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip("\n")
        if not self._held:
            return ""
        length = len(self._held) - partial_tag(self._held, CLOSE)
        while length and self._held[length - 1] == "\n":  # they may stand before the closing tag
            length -= 1
        return self._release(length)

    def _answer_so_far(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip("\n")
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._at_start = False
        return text


def split_reasoning(text: str, inside: bool = False) -> tuple[str, str]:
    """Return the (reasoning, answer) of a whole text."""
    splitter = ReasoningSplitter(inside)
    parts = [splitter.push(text), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def partial_tag(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` with which the tag begins."""
    return next((length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length])), 0)
