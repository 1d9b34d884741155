/* Attention of a block for AVX-512; called only where the processor has it. A compiler that does
 * not know the pragma compiles what attn_block_v3.c has. */
#pragma GCC target("arch=x86-64-v4")
#define NAME   cpu_attn_block_v4
#define TARGET "avx512"
#include "kernels/cpu/attn_block.inc"
