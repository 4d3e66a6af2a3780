"""From sampled tokens to text that may be shown: whole characters, and nothing that a stop string may still swallow."""

from collections.abc import Sequence as Items

from forge.tokenizer import StreamingDetokenizer


class OutputText:
    """The text of one sequence's output as it grows.

    Text is *released* once it is certain: it is complete UTF-8, and no stop string can begin in it. What has been
    released is never taken back, so it can be streamed.
    """

    def __init__(
        self,
        detokenizer: StreamingDetokenizer,
        stop: Items[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._unsearched = min_tokens
        """Tokens to come in whose text no stop string is searched."""
        self._released: list[str] = []
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was found; from then on nothing more is released."""

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that it made certain.

        First the detokenizer turns the token's bytes into whole characters. Without stop strings, and for the first
        `min_tokens`, these are released at once. Otherwise they join the held text, which is searched for stop strings,
        and all of it is released in which none can begin any more.
        """
        text = self._detokenizer.push(token_id)
        if self._stop and not self._unsearched:
            return self._take(text)
        if self._unsearched:
            self._unsearched -= 1
        self._released.append(text)  # nothing is held back
        return text

    def finish(self) -> str:
        """No token will follow: return what was held back."""
        released = self._take(self._detokenizer.flush())
        if self.stopped_by is None:
            released += self._release(len(self._held))
        return released

    def _take(self, new_text: str) -> str:
        if self.stopped_by is not None:
            return ""
        self._held += new_text
        matches = [(self._held.index(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in self._held]
        if not matches:
            return self._release(len(self._held) - self._possible_beginning())
        # The one that is complete first, and of those the longest: then it does not matter how text is cut into tokens.
        end, _, self.stopped_by = min(matches)
        return self._release(end if self._include_stop else end - len(self.stopped_by))

    def _possible_beginning(self) -> int:
        """Return the length of the longest end of the held text with which some stop string begins."""
        ends = (self._held[start:] for start in range(len(self._held)))  # the longest first
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._released.append(text)
        return text
