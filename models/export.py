"""Export to GGUF: a trained network and the tokenizer become one file that any Qwen3 GGUF reader loads.

Matrices are quantized to Q8_0 or Q4_0, norms stay F32. The embedding, which is also the output head, is Q8_0 in both: in a network
this narrow it decides the quality, and it is a tenth of the file. Tensor and key names are llama.cpp's for `qwen3`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from tokenizers import Tokenizer

from .corpus.tools import AFTER_TOOLS, BEFORE_TOOLS
from .network import Config, Qwen3
from .tokenizer import ADDED_TOKENS, CONTROL_TOKENS, USER_DEFINED_TOKENS, tokenizer_of

CHAT_TEMPLATE = (
    (
        "{% if tools %}"
        "{{ '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '') }}"
        "{{ BEFORE_TOOLS }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ AFTER_TOOLS + '<|im_end|>\\n' }}"
        "{% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% elif not (tools and loop.first and message['role'] == 'system') %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
        "{% for call in message['tool_calls'] or [] %}"
        "{% set function = call['function'] or call %}"
        "{{ ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}"
        "{{ function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
        "{% endfor %}"
        "{{ '<|im_end|>\\n' }}"
        "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    .replace("BEFORE_TOOLS", repr(BEFORE_TOOLS))
    .replace("AFTER_TOOLS", repr(AFTER_TOOLS))
)
"""As Qwen3's template writes turns, tools and calls, without thinking."""
FILE_TYPES = {"q8_0": LlamaFileType.MOSTLY_Q8_0, "q4_0": LlamaFileType.MOSTLY_Q4_0}
MATRIX_TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
BLOCK_TENSORS = {
    "attn_norm.weight": "attn_norm.weight",
    "attn.q.weight": "attn_q.weight",
    "attn.k.weight": "attn_k.weight",
    "attn.v.weight": "attn_v.weight",
    "attn.output.weight": "attn_output.weight",
    "attn.q_norm.weight": "attn_q_norm.weight",
    "attn.k_norm.weight": "attn_k_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate.weight",
    "ffn.up.weight": "ffn_up.weight",
    "ffn.down.weight": "ffn_down.weight",
}


def gguf_name(parameter: str) -> str:
    """The GGUF tensor name of a network parameter: "blocks.3.attn.q.weight" is "blk.3.attn_q.weight"."""
    if not parameter.startswith("blocks."):
        return parameter
    _, layer, rest = parameter.split(".", 2)
    return f"blk.{layer}.{BLOCK_TENSORS[rest]}"


def export(model: Qwen3, tokenizer: Tokenizer, path: Path, quantization: str) -> None:
    """Write the model to `path` in one step: a reader never sees half a file. `quantization` is "q8_0" or "q4_0"."""
    temporary = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "qwen3")
    add_hyperparameters(writer, model.config, FILE_TYPES[quantization])
    add_tokenizer(writer, tokenizer)
    for name, parameter in model.named_parameters():
        add_tensor(writer, gguf_name(name), parameter.detach().float().numpy(), MATRIX_TYPES[quantization])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)


def add_hyperparameters(writer: gguf.GGUFWriter, config: Config, file_type: LlamaFileType) -> None:
    writer.add_name(config.name)
    writer.add_license("mit")
    writer.add_file_type(file_type)
    writer.add_block_count(config.block_count)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embedding_length)
    writer.add_feed_forward_length(config.feed_forward_length)
    writer.add_head_count(config.head_count)
    writer.add_head_count_kv(config.head_count_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_epsilon)
    writer.add_rope_freq_base(config.rope_freq_base)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Vocabulary, merges, token types, special tokens and the chat template."""
    by_id = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    tokens = [token for token, _ in by_id]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([token_type(token) for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def token_type(token: str) -> TokenType:
    if token in CONTROL_TOKENS:
        return TokenType.CONTROL
    return TokenType.USER_DEFINED if token in USER_DEFINED_TOKENS else TokenType.NORMAL


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, matrix_type: GGMLQuantizationType) -> None:
    """Add one tensor: matrices quantized, vectors as they are."""
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    chosen = GGMLQuantizationType.Q8_0 if name == "token_embd.weight" else matrix_type
    writer.add_tensor(name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)


def load(path: Path) -> tuple[Qwen3, Tokenizer]:
    """The network and the tokenizer of a file that `export` wrote, with the weights as the file holds them."""
    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("qwen3."): field for name, field in reader.fields.items()}

    def value(name: str):
        return fields[name].contents()

    config = Config(
        value("general.name"),
        block_count=value("block_count"),
        embedding_length=value("embedding_length"),
        head_count=value("attention.head_count"),
        head_count_kv=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        feed_forward_length=value("feed_forward_length"),
        context_length=value("context_length"),
    )
    model = Qwen3(config)
    tensors = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
    }
    model.load_state_dict({name: tensors[gguf_name(name)] for name, _ in model.named_parameters()})
    tokens = [token for token in value("tokenizer.ggml.tokens") if token not in ADDED_TOKENS]
    return model.eval(), tokenizer_of(tokens, value("tokenizer.ggml.merges"))
