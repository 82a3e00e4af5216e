// What is computed between products, row by row: norm, GELU, rounding to bytes.

#include "vectors.h"

namespace {

// x / (1 + 2^t): all three forms of the GELU are this, or near it. A hundredth of a byte's step is exact enough.
inline __m512 gated(__m512 x, __m512 t) {
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(power_of_two(t), _mm512_set1_ps(1.0f))));
}

enum Gelu { TANH = 0, EXACT = 1, QUICK = 2 };

template <int form>
inline __m512 gelu(__m512 x) {
  constexpr float log2e = 1.44269504f;
  if constexpr (form == TANH) {  // tanh(u) = 2 sigmoid(2u) − 1
    __m512 factor = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-2 * 0.7978845608f * 0.044715f * log2e),
                                    _mm512_set1_ps(-2 * 0.7978845608f * log2e));
    return gated(x, _mm512_mul_ps(x, factor));
  } else if constexpr (form == QUICK) {
    return gated(x, _mm512_mul_ps(x, _mm512_set1_ps(-1.702f * log2e)));
  } else {  // x Φ(x); erf by Abramowitz and Stegun 7.1.26, right to 1.5e-7
    __m512 u = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.7071067812f));
    __m512 t = _mm512_rcp14_ps(_mm512_fmadd_ps(u, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1.0f)));
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

// The least and the largest of a row.
struct Extremes {
  __m512 low[4], high[4];

  Extremes() {
    for (int n = 0; n < 4; n++) low[n] = _mm512_set1_ps(3e38f), high[n] = _mm512_set1_ps(-3e38f);
  }
  void see(__m512 x, int n) { low[n] = _mm512_min_ps(low[n], x), high[n] = _mm512_max_ps(high[n], x); }
  Range range() const { return {least_of(low), largest_of(high)}; }
};

}  // namespace

extern "C" {

// The norm of each row, in bytes.
void norm_quantise(const float* z, const float* gain, const float* offset, float eps, int centred, uint8_t* out,
                   float* out_scale, float* out_least, int64_t rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const float* row = z + i * width;
    __m512 sums[4] = {}, squares[4] = {};
    if (centred) for_vectors(width, [&](int j, int n) { sums[n] = _mm512_add_ps(sums[n], _mm512_loadu_ps(row + j)); });
    const __m512 mean = _mm512_set1_ps(sum_of(sums) / width);
    for_vectors(width, [&](int j, int n) {
      __m512 x = _mm512_sub_ps(_mm512_loadu_ps(row + j), mean);
      squares[n] = _mm512_fmadd_ps(x, x, squares[n]);
    });
    const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(sum_of(squares) / width + eps));
    alignas(64) float normed[width];
    Extremes extremes;
    for_vectors(width, [&](int j, int n) {
      __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + j), mean), factor);
      x = offset ? _mm512_fmadd_ps(x, _mm512_loadu_ps(gain + j), _mm512_loadu_ps(offset + j))
                 : _mm512_mul_ps(x, _mm512_loadu_ps(gain + j));
      _mm512_store_ps(normed + j, x);
      extremes.see(x, n);
    });
    const Range range = extremes.range();
    out_scale[i] = range.step, out_least[i] = range.least;
    range.store(normed, width, out + i * width);
  }
}

// The GELU of each row, in bytes from `least` on, which none is below.
void gelu_quantise(const Bits* x, int form, float least, uint8_t* out, float* out_scale, float* out_least, int64_t rows,
                   int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    alignas(64) float hidden[width];
    __m512 most[4] = {};
    const Bits* row = x + i * width;
#define EACH(FORM)                           \
  for_vectors(width, [&](int j, int n) {     \
    __m512 y = gelu<FORM>(widened(row + j)); \
    _mm512_store_ps(hidden + j, y);          \
    most[n] = _mm512_max_ps(most[n], y);     \
  })
    if (form == TANH) EACH(TANH); else if (form == EXACT) EACH(EXACT); else EACH(QUICK);
#undef EACH
    const Range range(least, largest_of(most));
    out_scale[i] = range.step, out_least[i] = range.least;
    range.store(hidden, width, out + i * width);
  }
}

// Rows of float32 in bytes.
void quantise(const float* x, uint8_t* out, float* out_scale, float* out_least, int64_t rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const float* row = x + i * width;
    Extremes extremes;
    for_vectors(width, [&](int j, int n) { extremes.see(_mm512_loadu_ps(row + j), n); });
    const Range range = extremes.range();
    out_scale[i] = range.step, out_least[i] = range.least;
    range.store(row, width, out + i * width);
  }
}

}  // extern "C"
