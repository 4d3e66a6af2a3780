"""Every kernel by name. Naming one loads neither Numba nor the module that it is written in; compiling one does."""

from forge.backends.cpu.compilation import Kernel

embed_quantized = Kernel("kernels", "embed_quantized")
embed_float = Kernel("kernels", "embed_float")
rms_norm = Kernel("kernels", "rms_norm")
quantize = Kernel("kernels", "quantize")
matmul_quantized = Kernel("kernels", "matmul_quantized")
matmul_f32 = Kernel("kernels", "matmul_f32")
matmul_f16 = Kernel("kernels", "matmul_f16")
matmul_bf16 = Kernel("kernels", "matmul_bf16")
swiglu = Kernel("kernels", "swiglu")
gate_up_swiglu = Kernel("kernels", "gate_up_swiglu")
choose = Kernel("experts", "choose")
group = Kernel("experts", "group")
gather = Kernel("experts", "gather")
experts_quantized = Kernel("experts", "experts_quantized")
experts_f32 = Kernel("experts", "experts_f32")
experts_f16 = Kernel("experts", "experts_f16")
experts_bf16 = Kernel("experts", "experts_bf16")
combine = Kernel("experts", "combine")
norm_rope_store = Kernel("attention", "norm_rope_store")
attention = Kernel("attention", "attention")
