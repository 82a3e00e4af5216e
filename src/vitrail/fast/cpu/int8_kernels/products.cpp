// Products of bytes.

#include "vectors.h"

namespace {

constexpr int TALL = 6, WIDE = 4;  // rows and vectors of columns whose sums are in registers
constexpr int PANEL = WIDE * LANES;
constexpr int64_t BLOCK = 384;  // rows that one task multiplies with one panel

// Sums stay in their registers and columns are loaded once for all rows: compilers, left to themselves, copy the former
// and load the latter again, at half the speed.
inline void add_products(__m512i& sum, __m512i bytes, __m512i kernel) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(kernel));
}

template <int ROWS, int VECTORS, bool SHORT>
inline void tile(const uint8_t* rows, int64_t depth, const int8_t* panel, const float* scale, const float* correction,
                 void* out, int64_t stride) {
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
      std::memcpy(&four, rows + i * depth + k, 4);
      __m512i bytes = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) add_products(sums[i][j], bytes, columns[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; j++) {
    __m512 factor = _mm512_loadu_ps(scale + LANES * j), add = _mm512_loadu_ps(correction + LANES * j);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][j]), factor, add);
      if constexpr (SHORT)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<Bits*>(out) + i * stride + LANES * j),
                            (__m256i)_mm512_cvtneps_pbh(y));
      else
        _mm512_storeu_ps(static_cast<float*>(out) + i * stride + LANES * j, y);
    }
  }
}

struct Layer {
  const int8_t* kernel;
  const float *scale, *correction;
  int64_t width, depth;
};

// Rows [start, end) with one panel.
template <int VECTORS, bool SHORT>
void multiply_panel(const uint8_t* x, const Layer& layer, int64_t column, int64_t start, int64_t end, uint8_t* out) {
  const int8_t* panel = layer.kernel + column * layer.depth;
  const float *scale = layer.scale + column, *correction = layer.correction + column;
  for (int64_t i = start; i < end; i += TALL) {
    const uint8_t* rows = x + i * layer.depth;
    void* place = out + (i * layer.width + column) * (SHORT ? sizeof(Bits) : sizeof(float));
#define OF(ROWS) tile<ROWS, VECTORS, SHORT>(rows, layer.depth, panel, scale, correction, place, layer.width)
    switch (end - i) {
      case 1: OF(1); break;
      case 2: OF(2); break;
      case 3: OF(3); break;
      case 4: OF(4); break;
      case 5: OF(5); break;
      default: OF(TALL);
    }
#undef OF
  }
}

template <bool SHORT>
void multiply(const uint8_t* x, const Layer& layer, uint8_t* out, int64_t rows, int threads) {
  const int64_t panels = (layer.width + PANEL - 1) / PANEL, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < panels * blocks; task++) {
    const int64_t column = task % panels * PANEL, start = task / panels * BLOCK;
    const int64_t end = start + BLOCK < rows ? start + BLOCK : rows;
    switch (layer.width - column) {
      case 1 * LANES: multiply_panel<1, SHORT>(x, layer, column, start, end, out); break;
      case 2 * LANES: multiply_panel<2, SHORT>(x, layer, column, start, end, out); break;
      case 3 * LANES: multiply_panel<3, SHORT>(x, layer, column, start, end, out); break;
      default: multiply_panel<WIDE, SHORT>(x, layer, column, start, end, out);
    }
  }
}

}  // namespace

extern "C" {

// (rows, depth) bytes · kernel → (rows, width): the whole numbers' product · scale + correction, bf16 or float32. The
// kernel lies in panels of 64 columns, the last one narrower, and in a panel as (depth / 4, columns, 4).
void multiply_bytes(const uint8_t* x, const int8_t* kernel, const float* scale, const float* correction, void* out,
                    int is_short, int64_t rows, int64_t width, int64_t depth, int threads) {
  const Layer layer{kernel, scale, correction, width, depth};
  auto* bytes = static_cast<uint8_t*>(out);
  if (is_short)
    multiply<true>(x, layer, bytes, rows, threads);
  else
    multiply<false>(x, layer, bytes, rows, threads);
}

}  // extern "C"
