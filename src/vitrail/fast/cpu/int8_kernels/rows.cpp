// What is computed between products, row by row: sum and norm, GELU, rounding to bytes.

#include "vectors.h"

namespace {

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
