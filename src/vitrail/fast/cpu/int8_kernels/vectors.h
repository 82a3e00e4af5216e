// An int8 encoder's products and all that it computes between them, for processors with AVX-512, VNNI and bf16.
//
// Shapes: T rows (tokens of all images), D width, F hidden width of the MLP, H heads, d = D/H; D, F and d are multiples of
// 16. int8_operations.py says the same in torch, and is what this is tested against.
//
// A quantised row is x = scale · q + least, q a byte without a sign, as one side of the processor's products must be. Rows
// do not depend on each other; threads share them out.

#pragma once

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

// 2^x, right to 7.5e-5, a fiftieth of a byte's step: a polynomial of the part beyond the whole, which is left to the
// exponent. Infinite above 2^128.
inline __m512 power_of_two(__m512 x) {
  __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(7.802455205e-2f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.260671846e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.958334912e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.999252279e-1f));
  return _mm512_scalef_ps(y, x);
}

// Calls each(first column, a number below 4) for every vector of a row. Sums by that number do not wait for each other.
template <class Each>
inline void for_vectors(int width, Each each) {
  int j = 0;
  for (; j + 4 * LANES <= width; j += 4 * LANES) {
    each(j, 0);
    each(j + LANES, 1);
    each(j + 2 * LANES, 2);
    each(j + 3 * LANES, 3);
  }
  for (; j < width; j += LANES) each(j, 0);
}

inline float largest_of(const __m512* four) {
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(four[0], four[1]), _mm512_max_ps(four[2], four[3])));
}
inline float least_of(const __m512* four) {
  return _mm512_reduce_min_ps(_mm512_min_ps(_mm512_min_ps(four[0], four[1]), _mm512_min_ps(four[2], four[3])));
}
inline float sum_of(const __m512* four) {
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(four[0], four[1]), _mm512_add_ps(four[2], four[3])));
}

// Bytes of each(first column): rounded, within 0 … 255.
template <class Each>
inline void store_bytes(int width, uint8_t* out, Each each) {
  const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  auto whole = [&](int j) { return _mm512_cvtps_epi32(each(j)); };
  int j = 0;
  for (; j + 4 * LANES <= width; j += 4 * LANES) {
    __m512i first = _mm512_packs_epi32(whole(j), whole(j + LANES));
    __m512i second = _mm512_packs_epi32(whole(j + 2 * LANES), whole(j + 3 * LANES));
    _mm512_storeu_si512(out + j, _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(first, second)));
  }
  for (; j < width; j += LANES) {
    __m512i bytes = _mm512_max_epi32(whole(j), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm512_cvtusepi32_epi8(bytes));
  }
}

// x = step · q + least for bytes q.
struct Range {
  float step, least;

  Range(float low, float high) : step(high > low ? (high - low) / 255.0f : 1.0f), least(low) {}
  void store(const float* row, int width, uint8_t* out) const {
    const __m512 factor = _mm512_set1_ps(1.0f / step), add = _mm512_set1_ps(-least / step);
    store_bytes(width, out, [&](int j) { return _mm512_fmadd_ps(_mm512_loadu_ps(row + j), factor, add); });
  }
};

}  // namespace
