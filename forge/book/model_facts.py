"""What a chapter may say about its model before anything has run: `{{model.num_layers}}` in a question."""

from typing import Any

from forge.cache.kv_storage import KV_ITEM_BYTES, vector_bytes
from forge.model.catalog import DEFAULT_MODEL, is_hash_model, model_name, resolve_model


def model_facts(name: str = DEFAULT_MODEL, kv_dtype: str | None = None) -> dict[str, Any]:
    """Read the header of the model's file. Raises what `resolve_model` and `open_weights` raise."""
    if is_hash_model(name):
        from forge.tokenizer.byte_tokenizer import VOCAB_SIZE

        # The shape of its cache: one number for a key, one for a value.
        return _facts(name, kv_dtype or "float32", num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB_SIZE)
    from forge.model.loader import open_weights

    path = resolve_model(name)
    with open_weights(path) as source:
        config = source.config
        return _facts(
            model_name(path),
            kv_dtype or "float16",
            num_layers=config.num_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            num_attention_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            weight_bytes=source.nbytes,
        )


def _facts(name: str, kv_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int, **more: int) -> dict[str, Any]:
    return {
        "name": name,
        "has_weights": not is_hash_model(name),
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "bytes_per_number": KV_ITEM_BYTES[kv_dtype],
        "kv_bytes_per_token": 2 * num_layers * num_kv_heads * vector_bytes(head_dim, kv_dtype),
        "num_attention_heads": 0,
        "hidden_size": 0,
        "intermediate_size": 0,
        "weight_bytes": 0,
    } | more
