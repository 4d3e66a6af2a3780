"""Stored responses of `/v1/responses`, for `previous_response_id`, retrieval and deletion.

They are in this process's memory alone, as JSON and token ids, `max_bytes` of them together: the least recently used
are dropped. They end with the server. A client whose key has a name finds those of this name only; without names, a
client that knows a response's id, which is random, may read it.

The prompt of a conversation that goes on is the tokens of its last answer as they were generated, and the new turns.
Rendering the whole conversation anew might cut its text into other tokens, and chat templates leave old thinking out:
then little of the answer's keys and values would be found in the cache. So only what follows the answer is rendered,
behind a short stand-in for the conversation, and put behind the tokens.
"""

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from pydantic_core import from_json

from forge.server.engine_client import Prompt
from forge.server.errors import ApiError
from forge.server.requests import RequestReader
from forge.server.schema import ChatRequest, Message
from forge.tokenizer import Tokenizer

_OVERHEAD = 1024
"""Bytes of a stored response beside its parts."""


class ResponseKey(NamedTuple):
    """The owner and the id under which a response is stored."""

    owner: str | None
    """The name of the API key that it was made with, where keys have names."""
    response_id: str


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended, and what the next one needs to continue from it."""

    body: bytes
    """The response, as it was sent."""
    items: bytes
    """JSON: the conversation's items, what the model said included."""
    num_input_items: int
    """How many of them came before the model's output."""
    setting: bytes
    """What the prompt depends on beside the items: instructions, tools, thinking. A response of another setting has
    another prompt."""
    token_ids: np.ndarray | None
    """The prompt and the output, int32 `[n]`; None where the output did not end as the chat template ends an answer."""

    @property
    def size(self) -> int:
        """The size in bytes."""
        num_tokens = 0 if self.token_ids is None else len(self.token_ids)
        return len(self.body) + len(self.items) + len(self.setting) + 4 * num_tokens + _OVERHEAD

    def conversation(self) -> list[dict[str, Any]]:
        """Return the items of the conversation so far."""
        items: list[dict[str, Any]] = from_json(self.items)
        return items


class ResponseStore:
    """Stores responses by their owners and ids."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._responses: OrderedDict[ResponseKey, StoredResponse] = OrderedDict()
        """The stored responses, the last used last."""

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def stores(self) -> bool:
        """Whether it stores anything at all."""
        return self._max_bytes > 0

    def put(self, key: ResponseKey, response: StoredResponse) -> None:
        """Store a response; drop the least recently used ones if there is no room."""
        self._responses[key] = response
        self._num_bytes += response.size
        while self._num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self._num_bytes -= dropped.size

    def get(self, key: ResponseKey, status: int = 404) -> StoredResponse:
        """Return a response. Raises `ApiError` with `status` for one that is not stored, or not any more."""
        response = self._responses.get(key)
        if response is None:
            reasons = "it was dropped, deleted, sent with store false, or stored by another front of these engines"
            message = f"no response {key.response_id[:80]!r} is stored here: {reasons}"
            param, code = ("previous_response_id", "previous_response_not_found") if status == 400 else (None, None)
            raise ApiError(message, status, param=param, code=code)
        self._responses.move_to_end(key)
        return response

    def delete(self, key: ResponseKey) -> None:
        """Delete a response. Raises `ApiError` as `get` does."""
        self._num_bytes -= self.get(key).size
        del self._responses[key]


async def continued_prompt(
    reader: RequestReader, token_ids: list[int], chat: ChatRequest, messages: list[dict[str, Any]]
) -> Prompt | None:
    """Continue a conversation from its tokens. token_ids: a prompt and its output. messages: the new turns, to be shown
    as `chat` shows its own. None if the template does not show turns one after another. Raises `ApiError`."""
    answer = f"answer{secrets.token_hex(8)}"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}, *messages]
    shown = {"messages": [Message.model_validate(turn) for turn in turns], "add_special_tokens": False}
    new_ids = _behind(reader.tokenizer, await reader.chat_prompt(chat.model_copy(update=shown)), answer)
    if not new_ids:
        return None
    while token_ids and token_ids[-1] in reader.tokenizer.eos_token_ids:  # its keys were never computed
        token_ids = token_ids[:-1]
    whole = [*token_ids, *new_ids]
    return Prompt(reader.checked_ids(whole, "messages"), reader.tokenizer.decode(whole))


def _behind(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> list[int]:
    """Return the tokens of `prompt` behind the text `answer`; none if it is not there, or a token holds its end too."""
    _, separator, after = (prompt.text or "").rpartition(answer)
    after, number = normalize("NFC", after), len(prompt.token_ids)
    num_bytes = len(after.encode())
    while separator and num_bytes > 0 and number:
        number -= 1
        num_bytes -= len(tokenizer.token_bytes(prompt.token_ids[number]))
    before, behind = prompt.token_ids[:number], prompt.token_ids[number:]
    return behind if tokenizer.decode(before).endswith(answer) and tokenizer.decode(behind) == after else []
