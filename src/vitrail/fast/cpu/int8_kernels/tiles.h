// A few rows of bytes times a panel of columns, with all sums in registers.

#pragma once

#include "vectors.h"

namespace {

constexpr int TALL = 6, WIDE = 4;  // rows and vectors of columns whose sums are in registers

// Sums stay in their registers and columns are loaded once for all rows: compilers, left to themselves, copy the former
// and load the latter again, at half the speed.
inline void add_products(__m512i& sum, __m512i bytes, __m512i kernel) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(kernel));
}

// ROWS rows of bytes, `stride` apart, times a panel that lies as (depth / 4, VECTORS · 16 columns, 4). `finish.column(j)`
// returns what takes a row's number and its 16 sums of the vector j. It is not inlined, where sums would compete with the
// caller for registers.
template <int ROWS, int VECTORS, class Finish>
__attribute__((noinline)) void multiply_tile(const uint8_t* rows, int64_t stride, int64_t depth, const int8_t* panel, const Finish& finish) {
  finish.template prefetch<ROWS, VECTORS>();
  __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm512_setzero_si512();
  for (int64_t k = 0; k < depth; k += 4, panel += 4 * VECTORS * LANES) {
    __m512i columns[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
      columns[j] = _mm512_loadu_si512(panel + 64 * j);
      _mm_prefetch(reinterpret_cast<const char*>(panel + 64 * j + 2048), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      int32_t four;
      std::memcpy(&four, rows + i * stride + k, 4);
      __m512i bytes = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) add_products(sums[i][j], bytes, columns[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; j++) {
    const auto column = finish.column(j);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) column(i, _mm512_cvtepi32_ps(sums[i][j]));
  }
}

}  // namespace
