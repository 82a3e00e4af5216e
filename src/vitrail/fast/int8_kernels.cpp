// An int8 encoder's products and all that it computes between them, for processors with AVX-512, VNNI and bf16.
//
// Shapes: T rows (tokens of all images), D width, F hidden width of the MLP, H heads, d = D/H; D, F and d are multiples of
// 16. int8_steps.py says the same in torch, and is what this is tested against.
//
// A quantised row is x = scale · (q − 128), q a byte without a sign, as one side of the processor's products must be. A
// product leaves the scale out (`raw`), and whoever reads it next computes scale · raw + bias: every number goes to memory
// and comes back once. Rows do not depend on each other; threads share them out.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VNNI__) || !defined(__AVX512BF16__)
#error "this processor has no AVX-512 with VNNI and bf16"
#endif

namespace {

using Bits = uint16_t;  // of a bf16
constexpr int LANES = 16;

inline __m512 widened(const Bits* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
}

// 2^x, right to 3e-6: a polynomial of the part beyond the whole, which is left to the exponent.
inline __m512 power_of_two(__m512 x) {
  __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(1.353415165e-2f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.201149186e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.414427384e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.930038379e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.000002593f));
  return _mm512_scalef_ps(y, x);
}

inline __m512 reciprocal(__m512 x) {
  __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

// x / (1 + 2^−t): all three forms of the GELU are this, or near it.
inline __m512 gated(__m512 x, __m512 t) {
  __m512 down = power_of_two(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_max_ps(t, _mm512_set1_ps(-120.0f))));
  return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0f), down)));
}

enum Gelu { TANH = 0, EXACT = 1, QUICK = 2 };

template <int form>
inline __m512 gelu(__m512 x) {
  constexpr float log2e = 1.44269504f;
  if constexpr (form == TANH) {  // tanh(u) = 2 sigmoid(2u) − 1
    __m512 square = _mm512_mul_ps(x, x);
    __m512 factor = _mm512_fmadd_ps(square, _mm512_set1_ps(2 * 0.7978845608f * 0.044715f * log2e),
                                    _mm512_set1_ps(2 * 0.7978845608f * log2e));
    return gated(x, _mm512_mul_ps(x, factor));
  } else if constexpr (form == QUICK) {
    return gated(x, _mm512_mul_ps(x, _mm512_set1_ps(1.702f * log2e)));
  } else {  // x Φ(x); erf by Abramowitz and Stegun 7.1.26, right to 1.5e-7
    __m512 u = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.7071067812f));
    __m512 t = reciprocal(_mm512_fmadd_ps(u, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1.0f)));
    __m512 y = _mm512_set1_ps(1.061405429f);
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-1.453152027f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.421413741f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.284496736f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.254829592f));
    __m512 rest = _mm512_mul_ps(_mm512_mul_ps(y, t),
                                power_of_two(_mm512_mul_ps(_mm512_mul_ps(u, u), _mm512_set1_ps(-log2e))));
    // x > 0: x (1 − rest/2); x < 0: x rest/2.
    __m512 half = _mm512_mul_ps(rest, _mm512_set1_ps(0.5f));
    __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_mul_ps(x, _mm512_mask_sub_ps(half, positive, _mm512_set1_ps(1.0f), half));
  }
}

// One row in bytes: x · inverse + shift, rounded, within 0 … 255.
inline void to_bytes(const float* row, int width, float inverse, float shift, uint8_t* out) {
  __m512 factor = _mm512_set1_ps(inverse), add = _mm512_set1_ps(shift);
  for (int j = 0; j < width; j += LANES) {
    __m512i whole = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(row + j), factor, add));
    whole = _mm512_max_epi32(whole, _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm512_cvtusepi32_epi8(whole));
  }
}

inline float symmetric_bytes(const float* row, int width, uint8_t* out) {
  __m512 most = _mm512_setzero_ps();
  for (int j = 0; j < width; j += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(row + j)));
  float largest = _mm512_reduce_max_ps(most);
  float scale = largest > 0 ? largest / 127.0f : 1.0f;
  to_bytes(row, width, 1.0f / scale, 128.0f, out);
  return scale;
}

}  // namespace

extern "C" {

// z += scale · raw + bias where `raw` is given; then, where `out` is given, the norm of z, in bytes.
void add_norm_quantise(float* z, const float* raw, const float* scale, const float* bias, const float* gain,
                       const float* offset, float eps, int centred, uint8_t* out, float* out_scale, int64_t rows,
                       int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    float* row = z + i * width;
    __m512 sum = _mm512_setzero_ps();
    if (raw) {
      const float* product = raw + i * width;
      __m512 factor = _mm512_set1_ps(scale[i]);
      for (int j = 0; j < width; j += LANES) {
        __m512 y = _mm512_fmadd_ps(_mm512_loadu_ps(product + j), factor, _mm512_loadu_ps(bias + j));
        y = _mm512_add_ps(y, _mm512_loadu_ps(row + j));
        _mm512_storeu_ps(row + j, y);
        sum = _mm512_add_ps(sum, y);
      }
    } else {
      for (int j = 0; j < width; j += LANES) sum = _mm512_add_ps(sum, _mm512_loadu_ps(row + j));
    }
    if (!out) continue;
    __m512 mean = _mm512_set1_ps(centred ? _mm512_reduce_add_ps(sum) / width : 0.0f);
    __m512 squares = _mm512_setzero_ps();
    for (int j = 0; j < width; j += LANES) {
      __m512 x = _mm512_sub_ps(_mm512_loadu_ps(row + j), mean);
      squares = _mm512_fmadd_ps(x, x, squares);
    }
    float normal = 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + eps);
    __m512 factor = _mm512_set1_ps(normal);
    alignas(64) float normed[width];
    for (int j = 0; j < width; j += LANES) {
      __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + j), mean), factor);
      x = _mm512_mul_ps(x, _mm512_loadu_ps(gain + j));
      if (offset) x = _mm512_add_ps(x, _mm512_loadu_ps(offset + j));
      _mm512_store_ps(normed + j, x);
    }
    out_scale[i] = symmetric_bytes(normed, width, out + i * width);
  }
}

// GELU(scale · raw + bias), in bytes from `least` on: x = out_scale · q + least.
void gelu_quantise(const Bits* raw, const float* scale, const float* bias, int form, float least, uint8_t* out,
                   float* out_scale, int64_t rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    alignas(64) float hidden[width];
    __m512 factor = _mm512_set1_ps(scale[i]), most = _mm512_setzero_ps();
    const Bits* row = raw + i * width;
#define EACH(FORM)                                                                            \
  for (int j = 0; j < width; j += LANES) {                                                    \
    __m512 y = gelu<FORM>(_mm512_fmadd_ps(widened(row + j), factor, _mm512_loadu_ps(bias + j))); \
    _mm512_store_ps(hidden + j, y);                                                           \
    most = _mm512_max_ps(most, y);                                                            \
  }
    if (form == TANH) EACH(TANH) else if (form == EXACT) EACH(EXACT) else EACH(QUICK)
#undef EACH
    float step = (_mm512_reduce_max_ps(most) - least) / 255.0f;
    out_scale[i] = step;
    to_bytes(hidden, width, 1.0f / step, -least / step, out + i * width);
  }
}

// Rows of float32 in bytes.
void quantise(const float* x, uint8_t* out, float* out_scale, int64_t rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) out_scale[i] = symmetric_bytes(x + i * width, width, out + i * width);
}

}  // extern "C"

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

namespace {

inline __m512bh pairs(const Bits* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair(const Bits* from) {
  int32_t both;
  std::memcpy(&both, from, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

// QUERIES × (BLOCKS · 16) products of queries with packed keys, in float32.
template <int QUERIES, int BLOCKS>
inline void scores(const Bits* queries, const Bits* keys, int size, int padded, float* out) {
  __m512 sums[QUERIES][BLOCKS];
  for (int a = 0; a < QUERIES; a++)
    for (int b = 0; b < BLOCKS; b++) sums[a][b] = _mm512_setzero_ps();
  for (int p = 0; p < size / 2; p++) {
    __m512bh ahead[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) ahead[b] = pairs(keys + (int64_t(p) * padded + b * LANES) * 2);
    for (int a = 0; a < QUERIES; a++) {
      __m512bh one = pair(queries + a * size + 2 * p);
      for (int b = 0; b < BLOCKS; b++) sums[a][b] = _mm512_dpbf16_ps(sums[a][b], ahead[b], one);
    }
  }
  for (int a = 0; a < QUERIES; a++)
    for (int b = 0; b < BLOCKS; b++) _mm512_storeu_ps(out + a * padded + b * LANES, sums[a][b]);
}

// QUERIES × (BLOCKS · 16) channels of weights · values, each divided by its row's sum.
template <int QUERIES, int BLOCKS>
inline void mixed(const Bits* weights, const Bits* values, int size, int padded, const float* sum, int count, float* out,
                  int64_t stride) {
  __m512 sums[QUERIES][BLOCKS];
  for (int a = 0; a < QUERIES; a++)
    for (int b = 0; b < BLOCKS; b++) sums[a][b] = _mm512_setzero_ps();
  for (int p = 0; p < padded / 2; p++) {
    __m512bh ahead[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) ahead[b] = pairs(values + (int64_t(p) * size + b * LANES) * 2);
    for (int a = 0; a < QUERIES; a++) {
      __m512bh one = pair(weights + a * padded + 2 * p);
      for (int b = 0; b < BLOCKS; b++) sums[a][b] = _mm512_dpbf16_ps(sums[a][b], ahead[b], one);
    }
  }
  for (int a = 0; a < count; a++)
    for (int b = 0; b < BLOCKS; b++)
      _mm512_storeu_ps(out + a * stride + b * LANES, _mm512_mul_ps(sums[a][b], _mm512_set1_ps(1.0f / sum[a])));
}

constexpr int QUERIES = 4;       // in registers at a time
constexpr int GROUP = 4 * QUERIES;  // that pass over keys and values while these lie in the first cache
constexpr int MOST_BLOCKS = 5;

inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Rows of bf16 that stand for scale · raw + bias.
struct Rows {
  const Bits* raw;
  int64_t stride;
  const float *scale, *bias;

  __m512 at(int64_t row, int channel) const {
    // Rows lie far apart, which no processor foresees.
    _mm_prefetch(reinterpret_cast<const char*>(raw + (row + 12) * stride + channel), _MM_HINT_T0);
    return _mm512_fmadd_ps(widened(raw + row * stride + channel), _mm512_set1_ps(scale[row]),
                           _mm512_loadu_ps(bias + channel));
  }
  Rows moved(int64_t row, int channel) const {
    return {raw + row * stride + channel, stride, scale + row, bias + channel};
  }
};

// One head of one image: queries by rows; keys as pairs of channels, key beside key; values as pairs of keys, channel
// beside channel. Keys that fill up a block of 16 are zeros.
struct Head {
  int tokens, padded, size;
  float* products;
  Bits *keys, *values, *weights, *queries;

  Head(uint8_t* scratch, int tokens, int size, int asked)
      : tokens(tokens), padded(int(rounded_up(tokens, LANES))), size(size) {
    products = reinterpret_cast<float*>(scratch);
    keys = reinterpret_cast<Bits*>(products + GROUP * padded);
    values = keys + int64_t(padded) * size;
    weights = values + int64_t(padded) * size;
    queries = weights + GROUP * padded;
    std::memset(queries, 0, rounded_up(asked, QUERIES) * size * sizeof(Bits));
  }

  static int64_t bytes(int tokens, int size) {
    int64_t padded = rounded_up(tokens, LANES);
    return rounded_up(4 * GROUP * padded + 2 * (2 * padded * size + GROUP * padded + (tokens + QUERIES) * int64_t(size)),
                      64);
  }

  void take_queries(const Rows& rows, int asked, float factor) {
    for (int i = 0; i < asked; i++)
      for (int j = 0; j < size; j += LANES) {
        __m512 x = _mm512_mul_ps(rows.at(i, j), _mm512_set1_ps(factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries + i * size + j), (__m256i)_mm512_cvtneps_pbh(x));
      }
  }

  void take_keys(const Rows& rows) {
    for (int i = 0; i < padded; i++) {
      auto* out = reinterpret_cast<uint32_t*>(keys) + i;
      for (int j = 0; j < size; j += LANES) {
        alignas(32) uint32_t parts[LANES / 2];
        __m512 x = i < tokens ? rows.at(i, j) : _mm512_setzero_ps();
        _mm256_store_si256(reinterpret_cast<__m256i*>(parts), (__m256i)_mm512_cvtneps_pbh(x));
        for (int p = 0; p < LANES / 2; p++) out[int64_t(j / 2 + p) * padded] = parts[p];
      }
    }
  }

  void take_values(const Rows& rows) {
    const __m512i alternating = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = 0; i < padded; i += 2)
      for (int j = 0; j < size; j += LANES) {
        __m512 first = i < tokens ? rows.at(i, j) : _mm512_setzero_ps();
        __m512 second = i + 1 < tokens ? rows.at(i + 1, j) : _mm512_setzero_ps();
        __m512i both = _mm512_permutexvar_epi16(alternating, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        _mm512_storeu_si512(values + (int64_t(i / 2) * size + j) * 2, both);
      }
  }
};

// Softmax of a row in powers of two, in bf16 and not yet divided by its sum, which is returned.
inline float softened(const float* row, int tokens, int padded, Bits* out) {
  const int whole = tokens / LANES * LANES;
  const __mmask16 rest = (1u << (tokens - whole)) - 1;
  __m512 most = _mm512_set1_ps(-3e38f), other = most;
  int j = 0;
  for (; j + LANES < whole; j += 2 * LANES) {
    most = _mm512_max_ps(most, _mm512_loadu_ps(row + j));
    other = _mm512_max_ps(other, _mm512_loadu_ps(row + j + LANES));
  }
  if (j < whole) most = _mm512_max_ps(most, _mm512_loadu_ps(row + j));
  if (rest) most = _mm512_mask_max_ps(most, rest, most, _mm512_maskz_loadu_ps(rest, row + whole));
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(most, other)));
  __m512 sum = _mm512_setzero_ps();
  for (j = 0; j < padded; j += LANES) {
    __m512 y = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(row + j), largest));
    if (j == whole) y = _mm512_maskz_mov_ps(rest, y);
    sum = _mm512_add_ps(sum, y);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j), (__m256i)_mm512_cvtneps_pbh(y));
  }
  return _mm512_reduce_add_ps(sum);
}

template <int BLOCKS>
inline void scores_of(int blocks, const Bits* queries, const Bits* keys, int size, int padded, float* out) {
  if constexpr (BLOCKS > 0) {
    if (blocks == BLOCKS)
      scores<QUERIES, BLOCKS>(queries, keys, size, padded, out);
    else
      scores_of<BLOCKS - 1>(blocks, queries, keys, size, padded, out);
  }
}

inline void attend(const Head& head, int asked, float* out, int64_t stride) {
  const int size = head.size, padded = head.padded;
  for (int start = 0; start < asked; start += GROUP) {
    const int end = start + GROUP < asked ? start + GROUP : asked;
    for (int j = 0; j < padded;) {
      int blocks = (padded - j) / LANES;
      if (blocks > MOST_BLOCKS) blocks = blocks < 2 * MOST_BLOCKS ? (blocks + 1) / 2 : MOST_BLOCKS;
      for (int i = start; i < end; i += QUERIES)
        scores_of<MOST_BLOCKS>(blocks, head.queries + i * size, head.keys + 2 * j, size, padded,
                               head.products + (i - start) * padded + j);
      j += blocks * LANES;
    }
    float sums[GROUP] = {};
    for (int i = start; i < end; i++)
      sums[i - start] = softened(head.products + (i - start) * padded, head.tokens, padded,
                                 head.weights + (i - start) * padded);
    for (int j = 0; j < size;) {
      const bool four = size - j >= 4 * LANES;
      for (int i = start; i < end; i += QUERIES) {
        const int count = end - i < QUERIES ? end - i : QUERIES;
        const Bits* weights = head.weights + (i - start) * padded;
        float* place = out + i * stride + j;
        if (four)
          mixed<QUERIES, 4>(weights, head.values + 2 * j, size, padded, sums + i - start, count, place, stride);
        else
          mixed<QUERIES, 1>(weights, head.values + 2 * j, size, padded, sums + i - start, count, place, stride);
      }
      j += four ? 4 * LANES : LANES;
    }
  }
}

}  // namespace

extern "C" {

// Bytes of scratch that one thread needs.
int64_t attention_scratch(int tokens, int size) { return Head::bytes(tokens, size); }

// Self-attention in bf16: queries (B, asked, H, d) with rows `query_stride` apart, keys and values (B, T, 2, H, d), raw →
// (B, asked, H, d) float32.
void attention(const Bits* queries, int64_t query_stride, const float* query_scale, const float* query_bias,
               const Bits* keys, int64_t key_stride, const float* key_scale, const float* key_bias, float* out,
               uint8_t* scratch, int images, int tokens, int heads, int size, int asked, int threads) {
  const int width = heads * size;
  const float factor = 1.44269504f / __builtin_sqrtf(float(size));
  const int64_t all = int64_t(images) * heads;
  const Rows query_rows{queries, query_stride, query_scale, query_bias};
  const Rows key_rows{keys, key_stride, key_scale, key_bias};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; thread++) {
    Head head(scratch + thread * Head::bytes(tokens, size), tokens, size, asked);
    for (int64_t n = all * thread / threads; n < all * (thread + 1) / threads; n++) {
      const int64_t image = n / heads;
      const int channel = int(n % heads) * size;
      head.take_queries(query_rows.moved(image * asked, channel), asked, factor);
      head.take_keys(key_rows.moved(image * tokens, channel));
      head.take_values(key_rows.moved(image * tokens, width + channel));
      attend(head, asked, out + image * asked * width + channel, width);
    }
  }
}

}  // extern "C"
