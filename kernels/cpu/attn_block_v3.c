/* Attention of a block for AVX2, which the whole build asks for; and which of the two is used. */
#define NAME   cpu_attn_block_v3
#define TARGET "avx2"
#include "kernels/cpu/attn_block.inc"

static const struct attn_block *chosen;

const struct attn_block *cpu_attn_block(void)
{
    if (chosen)
        return chosen;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl")
               ? &cpu_attn_block_v4
               : &cpu_attn_block_v3;
}

void cpu_attn_block_choose(const struct attn_block *b)
{
    chosen = b;
}
