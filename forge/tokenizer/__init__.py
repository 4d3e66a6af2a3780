"""Text to tokens and back; importing it loads neither tokenizers, fastokens nor jinja2."""

from forge.tokenizer.detokenizer import StreamingDetokenizer
from forge.tokenizer.spec import TokenizerError, TokenizerSpec, TokenType, spec_from_gguf
from forge.tokenizer.tokenizer import Tokenizer

__all__ = [
    "StreamingDetokenizer",
    "TokenType",
    "Tokenizer",
    "TokenizerError",
    "TokenizerSpec",
    "spec_from_gguf",
    "spec_from_tokenizer_json",
]


def __getattr__(name: str) -> object:
    if name == "spec_from_tokenizer_json":  # the one part that a GGUF file does not need
        from forge.tokenizer.tokenizer_json import spec_from_tokenizer_json

        return spec_from_tokenizer_json
    raise AttributeError(f"module 'forge.tokenizer' has no attribute {name!r}")
