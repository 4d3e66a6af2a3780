"""The same tokenizer in Hugging Face's wrapper: tokenizer.json, with the files beside it that complete it.

Owns the translation into a `TokenizerSpec` and the refusal of every tokenizer.json that is not Qwen's kind. Reads
`tokenizer_config.json` (chat template, end of sequence), `chat_template.jinja` and `generation_config.json` where the
folder has them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge.errors import file_error
from forge.tokenizer.encoders import QWEN2_PATTERN
from forge.tokenizer.spec import TokenizerError, TokenizerSpec, TokenType

MAX_TOKEN_ID = 10_000_000
"""A vocabulary is a dense list; an id over this is a malformed file, not a large vocabulary."""


def spec_from_tokenizer_json(path: str | Path) -> TokenizerSpec:
    """Read the tokenizer of a Hugging Face folder, `path` being its tokenizer.json or the folder itself.

    Raises `TokenizerError` when it cannot be read, is malformed, or is not byte-level BPE as Qwen has it."""
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    document = _read_json(path, required=True)
    try:
        _check_kind(document, path)
        tokens, token_types = _vocabulary(document)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
        prefix_ids, suffix_ids = _added_around(document.get("post_processor"), path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{path.name}: malformed: {type(error).__name__} {error}") from error
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    config = _read_json(path.with_name("tokenizer_config.json"))
    return TokenizerSpec(
        tokens=tokens,
        token_types=np.array(token_types, np.int32),
        merges=merges,
        bos_token_id=id_of.get(_token_text(config.get("bos_token"))),
        pad_token_id=id_of.get(_token_text(config.get("pad_token"))),
        special_ids=dict(_special_ids(config, _read_json(path.with_name("generation_config.json")), id_of)),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        chat_template=_chat_template(path, config),
        key_prefix=f"{path.name}: ",
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise file_error(f"{path}: cannot be read", error) from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return document


def _check_kind(document: Mapping[str, Any], path: Path) -> None:
    model = document["model"]
    unsupported = [key for key in ("dropout", "unk_token", "byte_fallback", "ignore_merges") if model.get(key)]
    if model.get("type", "BPE") != "BPE" or unsupported:
        raise TokenizerError(f"{path.name}: model is not plain BPE ({', '.join(unsupported) or model['type']})")
    if (document.get("normalizer") or {}).get("type") != "NFC":
        raise TokenizerError(f"{path.name}: normalizer is not NFC, which Qwen's tokenizer has")
    steps = (document.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    if steps[0].get("pattern", {}).get("Regex") != QWEN2_PATTERN or steps[-1].get("type") != "ByteLevel":
        raise TokenizerError(f"{path.name}: pre_tokenizer does not split text as qwen2 does")


def _added_around(processor: Mapping[str, Any] | None, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and after one text. ByteLevel changes offsets only."""
    around: tuple[list[int], list[int]] = ([], [])
    steps = [] if processor is None else processor.get("processors", [processor])
    for step in steps:
        if step["type"] == "TemplateProcessing":
            added, place = step["special_tokens"], 0
            for piece in step["single"]:
                if "Sequence" in piece:
                    place = 1
                else:
                    around[place].extend(map(int, added[piece["SpecialToken"]["id"]]["ids"]))
        elif step["type"] != "ByteLevel":
            raise TokenizerError(f"{path.name}: post_processor {step['type']} is not supported")
    return tuple(around[0]), tuple(around[1])


def _vocabulary(document: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens and their types by id; ids that nothing claims are padding."""
    type_of = {token_id: (token, TokenType.NORMAL) for token, token_id in document["model"]["vocab"].items()}
    for added in document.get("added_tokens") or []:
        added_type = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        type_of[added["id"]] = (added["content"], added_type)
    if not type_of or not all(isinstance(token_id, int) and 0 <= token_id <= MAX_TOKEN_ID for token_id in type_of):
        raise ValueError(f"token ids must be 0 to {MAX_TOKEN_ID}")
    padded = [type_of.get(token_id) or (f"[PAD{token_id}]", TokenType.UNUSED) for token_id in range(max(type_of) + 1)]
    return [token for token, _ in padded], [int(token_type) for _, token_type in padded]


def _special_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], id_of: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Return `eos_token_id` first, then the others that generation_config.json ends on, under numbered names."""
    named = generation.get("eos_token_id", [])
    ends = [end for end in (named if isinstance(named, list) else [named]) if isinstance(end, int)]
    eos = id_of.get(_token_text(config.get("eos_token")), ends[0] if ends else None)
    if eos is not None:
        yield "eos_token_id", eos
    yield from ((f"eos_token_id[{number}]", end) for number, end in enumerate(ends))


def _token_text(token: Any) -> str:
    """Return a token's text; an empty one, which no token is, if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    beside = path.with_name("chat_template.jinja")
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
