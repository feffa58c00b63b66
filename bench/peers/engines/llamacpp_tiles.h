// Put in front of every source of llama.cpp (-include) as it is compiled.
//
// GCC's own _tile_loadconfig tells the compiler of 8 of the 64 bytes that the instruction reads, so GCC 12 leaves out what
// ggml's ggml_tile_config_init writes into the others: rows and bytes of every AMX tile are 0, and the first tile
// instruction is illegal. This one names all 64. It takes effect only where the sources are compiled for AMX.

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64])(config)))
#endif
