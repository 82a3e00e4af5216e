// An int8 encoder's products and all that it computes between them, for processors with AVX-512, VNNI and bf16.
//
// Shapes: T rows (tokens of all images), D width, F hidden width of the MLP, H heads, d = D/H; D, F and d are multiples of
// 16. int8_steps.py says the same in torch, and is what this is tested against.
//
// A quantised row is x = scale · (q − 128), q a byte without a sign, as one side of the processor's products must be. A
// product leaves the scale out (`raw`), and whoever reads it next computes scale · raw + bias: every number goes to memory
// and comes back once. Rows do not depend on each other; threads share them out.

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

}  // namespace
