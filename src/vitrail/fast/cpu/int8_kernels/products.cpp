// Products of bytes with weights.

#include "tiles.h"

namespace {

constexpr int PANEL = WIDE * LANES;
constexpr int64_t BLOCK = 384;  // rows that one task multiplies with one panel

struct Layer {
  const int8_t* kernel;
  const float *scale, *sums, *bias;
  int64_t width, depth;
};

struct Input {
  const uint8_t* bytes;
  const float *scale, *least;
};

enum Result { FLOAT = 0, SHORT = 1, ADDED = 2 };

// row scale · sum · scale + row least · column's sum + bias, as float32, as bf16, or added to what is there.
template <int RESULT>
struct Output {
  const float *scale, *sums, *bias, *row_scale, *row_least;
  uint8_t* out;
  int64_t stride;

  // What is added to has long left the cache; it comes back while sums are computed.
  template <int ROWS, int VECTORS>
  void prefetch() const {
    if constexpr (RESULT == ADDED)
      for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) __builtin_prefetch(reinterpret_cast<float*>(out) + i * stride + LANES * j, 1);
  }

  auto column(int j) const {
    const __m512 factor = _mm512_loadu_ps(scale + LANES * j), ones = _mm512_loadu_ps(sums + LANES * j);
    const __m512 add = _mm512_loadu_ps(bias + LANES * j);
    return [=](int i, __m512 sum) {
      __m512 y = _mm512_fmadd_ps(ones, _mm512_set1_ps(row_least[i]), add);
      y = _mm512_fmadd_ps(_mm512_mul_ps(sum, factor), _mm512_set1_ps(row_scale[i]), y);
      if constexpr (RESULT == SHORT) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<Bits*>(out) + i * stride + LANES * j),
                            (__m256i)_mm512_cvtneps_pbh(y));
      } else {
        float* place = reinterpret_cast<float*>(out) + i * stride + LANES * j;
        if constexpr (RESULT == ADDED) y = _mm512_add_ps(y, _mm512_loadu_ps(place));
        _mm512_storeu_ps(place, y);
      }
    };
  }
};

template <int VECTORS, int RESULT>
inline void multiply_panel(const Input& x, const Layer& layer, int64_t column, int64_t start, int64_t end, uint8_t* out) {
  const int8_t* panel = layer.kernel + column * layer.depth;
  for (int64_t i = start; i < end; i += TALL) {
    const uint8_t* rows = x.bytes + i * layer.depth;
    const Output<RESULT> output{layer.scale + column, layer.sums + column, layer.bias + column, x.scale + i, x.least + i,
                                out + (i * layer.width + column) * (RESULT == SHORT ? sizeof(Bits) : sizeof(float)),
                                layer.width};
#define OF(ROWS) multiply_tile<ROWS, VECTORS>(rows, layer.depth, layer.depth, panel, output)
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

template <int RESULT>
void multiply(const Input& x, const Layer& layer, uint8_t* out, int64_t rows, int threads) {
  const int64_t panels = (layer.width + PANEL - 1) / PANEL, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < panels * blocks; task++) {
    const int64_t column = task % panels * PANEL, start = task / panels * BLOCK;
    const int64_t end = start + BLOCK < rows ? start + BLOCK : rows;
    switch (layer.width - column) {
      case 1 * LANES: multiply_panel<1, RESULT>(x, layer, column, start, end, out); break;
      case 2 * LANES: multiply_panel<2, RESULT>(x, layer, column, start, end, out); break;
      case 3 * LANES: multiply_panel<3, RESULT>(x, layer, column, start, end, out); break;
      default: multiply_panel<WIDE, RESULT>(x, layer, column, start, end, out);
    }
  }
}

}  // namespace

extern "C" {

// (rows, depth) bytes · kernel → (rows, width): row scale · the whole numbers' product · scale + row least · sums + bias,
// in float32, in bf16, or added to what is there. The kernel lies in panels of 64 columns, the last one narrower, and in a
// panel as (depth / 4, columns, 4).
void multiply_bytes(const uint8_t* x, const float* row_scale, const float* row_least, const int8_t* kernel,
                    const float* scale, const float* sums, const float* bias, void* out, int result, int64_t rows,
                    int64_t width, int64_t depth, int threads) {
  const Input input{x, row_scale, row_least};
  const Layer layer{kernel, scale, sums, bias, width, depth};
  auto* bytes = static_cast<uint8_t*>(out);
  if (result == SHORT)
    multiply<SHORT>(input, layer, bytes, rows, threads);
  else if (result == ADDED)
    multiply<ADDED>(input, layer, bytes, rows, threads);
  else
    multiply<FLOAT>(input, layer, bytes, rows, threads);
}

}  // extern "C"
