"""Fusion passes a model's operations on as the fused ones of a backend."""

import pytest

from forge.backends.fusion import FusedOperations, Fusion, Norm
from forge.backends.reference import ReferenceBackend
from forge.errors import UsageError
from tests.backends.cpu.models import small_model


class Log(FusedOperations):
    """Names its calls; a result is the number of the call it came from."""

    def __init__(self):
        self.calls: list[str] = []

    def _call(self, text: str) -> int:
        self.calls.append(text)
        return len(self.calls) - 1

    def embed(self, table):
        return self._call("embed")

    def products(self, source, matrices):
        call = self._call(f"products of {self._shown(source)}")
        return [call] * len(matrices)

    def attention(self, qkv, q_norm, k_norm, rope, layer):
        assert q_norm.x == qkv[0] and k_norm.x == qkv[1]
        return self._call(f"attention of {qkv[0]} in layer {layer}")

    def gated(self, source, gate, up, reader):
        return self._call(f"gated of {self._shown(source)}")

    def add_product(self, x, source, matrix):
        return self._call(f"{x} + product of {self._shown(source)}")

    def result(self, source, matrix):
        self._call(f"{'hidden' if matrix is None else 'logits'} of {self._shown(source)}")

    def _shown(self, source) -> str:
        return f"norm of {source.x}" if isinstance(source, Norm) else str(source)


def test_a_layer_is_five_fused_operations():
    log = Log()
    small_model(ReferenceBackend(), "F32", num_layers=2).forward_pass(Fusion(log), None, None)
    assert log.calls == [
        "embed",
        "products of norm of 0",
        "attention of 1 in layer 0",
        "0 + product of 2",
        "gated of norm of 3",
        "3 + product of 4",
        "products of norm of 5",
        "attention of 6 in layer 1",
        "5 + product of 7",
        "gated of norm of 8",
        "8 + product of 9",
        "logits of norm of 10",
    ]


def test_a_pass_without_a_head_ends_in_its_last_norm():
    log = Log()
    small_model(ReferenceBackend(), "F32", num_layers=1).hidden_pass(Fusion(log), None, None)
    assert log.calls[-1] == "hidden of norm of 5"


def test_a_backend_without_experts_says_so():
    model = small_model(ReferenceBackend(), "F32", num_experts=4, num_experts_per_tok=2)
    with pytest.raises(UsageError, match="runs no mixture of experts: use --device cpu"):
        model.forward_pass(Fusion(Log()), None, None)
