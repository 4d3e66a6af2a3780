"""Text to tokens and back; importing it loads neither tokenizers, fastokens nor jinja2."""

from forge.tokenizer.detokenizer import StreamingDetokenizer
from forge.tokenizer.spec import TokenizerError, TokenizerSpec, TokenType, spec_from_gguf
from forge.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDetokenizer", "TokenType", "Tokenizer", "TokenizerError", "TokenizerSpec", "spec_from_gguf"]
