"""The prompt of a conversation that goes on: the tokens of its last answer as they were generated, and the new turns.

Rendering the whole conversation anew might cut its text into other tokens, and chat templates leave old thinking out:
then little of the answer's keys and values would be found in the cache. So only what follows the answer is rendered,
behind a short stand-in for the conversation, and put behind the tokens.
"""

import secrets
from typing import Any
from unicodedata import normalize

from forge.server.engine_client import Prompt
from forge.server.requests import RequestReader
from forge.server.schema import ChatRequest, Message
from forge.tokenizer import Tokenizer


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
