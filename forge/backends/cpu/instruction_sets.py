"""One class per instruction set: how a machine multiplies 16 x 4 bytes of weights with 4 bytes of activations.

Everything else in the kernels is plain vector arithmetic that LLVM maps to any machine. The int8 dot product is not: it
is the one operation for which processors have grown instructions, each a little different. All of them compute

    acc[lane] += w[4*lane]*x[0] + w[4*lane + 1]*x[1] + w[4*lane + 2]*x[2] + w[4*lane + 3]*x[3]     lane = 0 … 15

exactly, in integers, so a result cannot depend on which one ran. Weights are unsigned bytes, activations signed.
"""

import platform

from llvmlite import ir

from forge.backends.cpu.llvm_code import I8, I16, I32, LANES, V_I32, call_intrinsic, constant


def _part(builder: ir.IRBuilder, vector: ir.Value, index: int, width: int) -> ir.Value:
    """Return lanes `index * width` to `(index + 1) * width` - 1."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    lanes = list(range(index * width, (index + 1) * width))
    return builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, width), lanes))


def _join(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Concatenate vectors."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class InstructionSet:
    """Emits the int8 dot product of one instruction set (`dot`), and names its target and the features it needs."""

    name: str
    instruction: str
    """The mnemonic that must appear in the machine code."""
    target_cpu: str | None = None
    """The LLVM processor model to compile for when this set is forced; None compiles for the machine in use."""
    target_features: str = ""
    converts_half_by_call = False
    """Whether LLVM may have to call a library to convert float16, because the processor cannot."""
    signed_weights = False
    """Whether `dot` wants weights as signed bytes (w - 128) instead of unsigned ones."""
    sums_at_once = 4
    """How many vectors of 16 sums stay in registers beside what is added to them: 4 where one takes two of 16 registers
    (AVX2) or four of 32 (NEON)."""

    def dot(self, builder: ir.IRBuilder, acc: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
        """acc, weights and x are 16 int32 lanes; a lane of weights is 4 bytes, each lane of x the same 4 bytes."""
        raise NotImplementedError


class Avx512Vnni(InstructionSet):
    """VPDPBUSD on 512 bits: 64 products in one instruction (Intel since Ice Lake, AMD since Zen 4)."""

    name = "avx512-vnni"
    instruction = "vpdpbusd"
    sums_at_once = 16

    def dot(self, builder, acc, weights, x):
        return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", V_I32, acc, weights, x)


class AvxVnni(InstructionSet):
    """VPDPBUSD on 256 bits, for processors that have it without AVX-512 (Intel since Alder Lake)."""

    name = "avx-vnni"
    instruction = "vpdpbusd"
    target_cpu = "alderlake"

    def dot(self, builder, acc, weights, x):
        half = ir.VectorType(I32, 8)
        return _join(
            builder,
            [
                call_intrinsic(
                    builder,
                    "llvm.x86.avx512.vpdpbusd.256",
                    half,
                    *(_part(builder, value, index, 8) for value in (acc, weights, x)),
                )
                for index in range(2)
            ],
        )


class Avx2(InstructionSet):
    """VPMADDWD on bytes widened to 16 bits.

    The obvious instruction, VPMADDUBSW, adds two products in 16 bits and saturates: 255 * 127 * 2 does not fit. So even
    and odd bytes are widened apart, which needs no move across lanes, and multiplied as pairs of 16-bit numbers.
    """

    name = "avx2"
    instruction = "vpmaddwd"
    target_cpu = "haswell"

    def dot(self, builder, acc, weights, x):
        wide = ir.VectorType(I16, 32)
        eight, mask = constant(wide, 8), constant(wide, 0xFF)
        w, x = builder.bitcast(weights, wide), builder.bitcast(x, wide)
        even = self._multiply_pairs(builder, builder.and_(w, mask), builder.ashr(builder.shl(x, eight), eight))
        odd = self._multiply_pairs(builder, builder.lshr(w, eight), builder.ashr(x, eight))
        return builder.add(acc, builder.add(even, odd))

    def _multiply_pairs(self, builder, a, b):
        half = ir.VectorType(I32, 8)
        return _join(
            builder,
            [
                call_intrinsic(
                    builder, "llvm.x86.avx2.pmadd.wd", half, _part(builder, a, index, 16), _part(builder, b, index, 16)
                )
                for index in range(2)
            ],
        )


class NeonDot(InstructionSet):
    """SDOT of ARMv8.2: 16 products in one instruction, weights signed."""

    name = "neon-dot"
    instruction = "sdot"
    target_features = "+dotprod"
    signed_weights = True

    def dot(self, builder, acc, weights, x):
        bytes_ = ir.VectorType(I8, 16)
        return _join(
            builder,
            [
                call_intrinsic(
                    builder,
                    "llvm.aarch64.neon.sdot.v4i32.v16i8",
                    ir.VectorType(I32, 4),
                    _part(builder, acc, index, 4),
                    builder.bitcast(_part(builder, weights, index, 4), bytes_),
                    builder.bitcast(_part(builder, x, index, 4), bytes_),
                )
                for index in range(4)
            ],
        )


class Portable(InstructionSet):
    """Shifts and 32-bit multiplications of LLVM's own vectors: slow, and right on every machine.

    When forced on x86, code is made for the oldest 64-bit processor: no AVX, no fused multiplication, no float16.
    """

    name = "portable"
    instruction = "mul"
    target_cpu = "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else None
    converts_half_by_call = True

    def dot(self, builder, acc, weights, x):
        for byte in range(4):
            up = constant(V_I32, 24 - 8 * byte)
            w = builder.and_(builder.lshr(weights, constant(V_I32, 8 * byte)), constant(V_I32, 0xFF))
            signed = builder.ashr(builder.shl(x, up), constant(V_I32, 24))
            acc = builder.add(acc, builder.mul(w, signed))
        return acc


assert LANES == 16
INSTRUCTION_SETS: dict[str, type[InstructionSet]] = {
    set_.name: set_ for set_ in (Avx512Vnni, AvxVnni, Avx2, NeonDot, Portable)
}
