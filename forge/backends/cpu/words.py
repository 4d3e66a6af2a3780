"""Where a kernel finds its arguments: the words of an operation and of the batch context, all int64.

An operation is built once, when a model's forward pass is recorded; the batch context is filled in for every forward.
Names end in nothing for an address of float32, in the element type otherwise.
"""

# Words of the batch context.
CTX_ROWS = 0  # T
CTX_LOGIT_ROWS = 1  # R
CTX_SEQUENCES = 2  # S
CTX_TOKEN_IDS = 3  # int32 [T]
CTX_POSITIONS = 4  # int32 [T]
CTX_CU_SEQLENS = 5  # int32 [S + 1]
CTX_SLOTS = 6  # int32 [T]
CTX_TABLES = 7  # int32 [S, CTX_TABLE_STRIDE]
CTX_TABLE_STRIDE = 8
CTX_LOGIT_ROW_NUMBERS = 9  # int32 [R]
CTX_KEYS = 10  # the KV storage, [blocks, layers, kv heads, block size, padded head dim]
CTX_VALUES = 11
CTX_BLOCK_SIZE = 12
CTX_LAYER_BYTES = 13  # of one block in one layer
CTX_BLOCK_BYTES = 14  # of one block in all layers
CTX_HEAD_BYTES = 15  # of one head of them
CTX_ROW_BYTES = 16  # of one token of that
CTX_KV_KIND = 17  # index into KV_KINDS
CTX_ROPE_COS = 18  # [positions, head_dim / 2]
CTX_ROPE_SIN = 19
CTX_SCRATCH = 20  # threads' private memory
CTX_SCRATCH_BYTES = 21  # of each thread
CTX_EXPERT_ROWS = 22  # T times the experts of each row
CTX_WORDS = 24

KV_KINDS = ("float32", "float16", "bfloat16")
KIND_F32, KIND_F16, KIND_BF16 = 0, 1, 2

# Words of operations. 0, 1 and 24 belong to the team; every operation that loops over rows has the number of the
# context word that counts them.
ROWS_WORD = 2

EMBED_TABLE, EMBED_SCALES, EMBED_MINIMUMS, EMBED_OUT, EMBED_STRIDE, EMBED_COLUMNS, EMBED_BITS, EMBED_BIAS = range(3, 11)
EMBED_GROUP, EMBED_KIND, EMBED_SUPERBLOCK, EMBED_UNIT = range(
    11, 15
)  # kind of a float table; bytes, 0 if there is none
# EMBED_MINIMUMS of a K type only says whether there are any: they lie among the scales.

NORM_IN, NORM_STRIDE, NORM_WIDTH, NORM_WEIGHT, NORM_EPS, NORM_OUT, NORM_ROW_NUMBERS = range(3, 10)
NORM_QUANTS, NORM_SCALES, NORM_SUMS = 10, 11, 12  # 0: not quantized; NORM_ROW_NUMBERS 0: all rows

MM_TILES, MM_WEIGHTS, MM_SCALES, MM_MINIMUMS, MM_X, MM_X_SCALES, MM_X_SUMS, MM_OUT = range(3, 11)
MM_NUM_TILES, MM_GROUPS, MM_X_STRIDE, MM_OUT_STRIDE, MM_ADD = range(11, 16)
MM_TILE_BYTES, MM_TILE_SCALE_BYTES, MM_CHUNK = 16, 17, 18

QKV_Q, QKV_K, QKV_V, QKV_Q_STRIDE, QKV_KV_STRIDE, QKV_HEADS, QKV_KV_HEADS, QKV_HEAD_DIM = range(3, 11)
QKV_Q_NORM, QKV_K_NORM, QKV_EPS, QKV_LAYER = 11, 12, 13, 14

ATT_Q, ATT_Q_STRIDE, ATT_OUT, ATT_HEADS, ATT_KV_HEADS, ATT_HEAD_DIM, ATT_LAYER, ATT_SCALE = range(3, 11)

QUANT_IN, QUANT_STRIDE, QUANT_WIDTH, QUANT_QUANTS, QUANT_SCALES, QUANT_SUMS = range(3, 9)

GLU_GATE, GLU_UP, GLU_STRIDE, GLU_WIDTH, GLU_OUT, GLU_QUANTS, GLU_SCALES, GLU_SUMS = range(3, 11)

FFN_X, FFN_X_SCALES, FFN_X_SUMS, FFN_X_STRIDE, FFN_GROUPS, FFN_PAIRS, FFN_OUT_STRIDE = range(2, 9)
FFN_QUANTS, FFN_SCALES, FFN_SUMS, FFN_CHUNK = 9, 10, 11, 12
FFN_GATE, FFN_UP = 13, 25  # the first of the six words that describe each matrix:
PAIR_TILES, PAIR_WEIGHTS, PAIR_SCALES, PAIR_MINIMUMS, PAIR_TILE_BYTES, PAIR_SCALE_BYTES = range(6)

# A mixture of experts. Its products have the words of matrix products too, up to 18.
MOE_EXPERTS, MOE_TILES_EACH, MOE_STARTS = 19, 20, 21  # int32 [experts + 1]
MOE_USED, MOE_STRIDE, MOE_IN, MOE_IN_STRIDE, MOE_CHOSEN, MOE_WEIGHTS, MOE_PLACES, MOE_NORMALIZE = range(3, 11)
MOE_ROWS, MOE_ROWS_STRIDE, MOE_OUT, MOE_QUANTS, MOE_OUT_QUANTS = 11, 12, 13, 14, 25  # the last two: three words each

# Sizes that the kernels and the code that lays out their memory agree on.
CHUNK = 64
"""Keys that attention reduces together: absolute positions 0 to 63, 64 to 127, …"""
ROWS_PER_BLOCK = 16
"""Rows of one sequence that share a pass over its keys."""
GLU_SCRATCH_FLOATS = 8 * 2 * 32
"""What `gate_up_swiglu` needs of a thread's scratch: eight rows of 32 gates and 32 ups."""

# An operation, and the words of it that belong to the team.
OP_WORDS = 32
OP_BYTES = 8 * OP_WORDS
WAIT_WORD = 1
NEXT_WORD = 24
CLAIM_WORD = 31

# Words of the memory that a team's threads share, a cache line (8 words) apart where several write them.
TEAM_GENERATION, TEAM_PROGRAM, TEAM_NUM_OPS, TEAM_CONTEXT, TEAM_NUM_THREADS, TEAM_SLEEPERS = 0, 8, 9, 10, 11, 12
TEAM_CLOSED, TEAM_DONE, TEAM_INSIDE, TEAM_ASLEEP = 16, 24, 32, 96
TEAM_INSIDE_SLOTS = 64
TEAM_WORDS = 104  # and one for each thread from TEAM_ASLEEP on
