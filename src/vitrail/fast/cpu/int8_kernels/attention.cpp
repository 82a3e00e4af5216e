// Self-attention in bf16.

#include "vectors.h"

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
