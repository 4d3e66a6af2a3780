"""Text from a stream of token ids, as soon as it is certain and never sooner.

A token is bytes, and a character may span several tokens, so a token may end inside one. `StreamingDetokenizer` holds
such an end back until the bytes that complete it arrive or the stream ends. It does constant work per token: at most
three bytes are carried over, and nothing is decoded twice.
"""

from codecs import getincrementaldecoder

from forge.tokenizer.tokenizer import Tokenizer


class StreamingDetokenizer:
    """One stream's state. All `push` results and the `flush` joined equal `tokenizer.decode(all ids)`, exactly.

    Invalid bytes become U+FFFD, as many as Python's incremental UTF-8 decoder makes of them: one for each maximal part
    of a sequence that cannot be completed (Unicode 3.9, "maximal subparts"), so an invalid byte shows at the latest
    with the byte after it. With `skip_special` control tokens give no text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._bytes = tokenizer.shown_bytes if skip_special else tokenizer.bytes_of
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` makes certain, often empty. The table of bytes raises `UsageError` for an id
        outside the vocabulary."""
        return self._decoder.decode(self._bytes[token_id])

    def flush(self) -> str:
        """Return what is still held back, as U+FFFD, at the end of the stream; the next `push` starts a new one."""
        return self._decoder.decode(b"", final=True)
