// Self-attention in bytes.
//
// What is the same for all keys of a query does not change its softmax, and weights that add up to one may leave out what
// is the same for all values. So keys are rounded without their mean, and values around the middle of their channel.
// Queries and keys have a scale per row, values one per channel, and the weights of a query are bytes whose sum divides.

#include <type_traits>

#include "tiles.h"

namespace {

constexpr float NEVER = -1e30f;  // the score of a key that only fills up a vector

inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

struct Rows {
  const Bits* first;
  int64_t stride;

  __m512 at(int64_t row, int channel) const {
    // Rows lie far apart, which no processor foresees.
    _mm_prefetch(reinterpret_cast<const char*>(first + (row + 12) * stride + channel), _MM_HINT_T0);
    return widened(first + row * stride + channel);
  }
  Rows moved(int64_t row, int channel) const { return {first + row * stride + channel, stride}; }
};

// Calls with a number of vectors that the compiler knows.
template <class Each>
inline void with_vectors(int vectors, Each each) {
  switch (vectors) {
    case 1: each(std::integral_constant<int, 1>()); break;
    case 2: each(std::integral_constant<int, 2>()); break;
    case 3: each(std::integral_constant<int, 3>()); break;
    default: each(std::integral_constant<int, WIDE>());
  }
}

// 16 × 16 numbers: in four steps, what lies 1, 2, 4 and 8 beside the diagonal changes places.
inline void transpose(__m512i* square) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
    const __mmask16 odd = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(step));
    const __m512i low = _mm512_mask_add_epi32(lanes, odd, lanes, _mm512_set1_epi32(LANES - step));
    const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(step)), odd, lanes,
                                               _mm512_set1_epi32(LANES));
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & step)) {
        const __m512i first = square[i], second = square[i + step];
        square[i] = _mm512_permutex2var_epi32(first, low, second);
        square[i + step] = _mm512_permutex2var_epi32(first, high, second);
      }
  }
}

struct Scores {
  const float *factor, *correction;
  float* out;
  int64_t stride;

  template <int, int>
  void prefetch() const {}
  auto column(int j) const {
    const __m512 times = _mm512_loadu_ps(factor + LANES * j), add = _mm512_loadu_ps(correction + LANES * j);
    return [=](int i, __m512 sum) { _mm512_storeu_ps(out + i * stride + LANES * j, _mm512_fmadd_ps(sum, times, add)); };
  }
};

struct Means {
  const float *step, *middle, *inverse;  // inverse: of the sum of a query's weights
  float* out;
  int64_t stride;
  int count;

  template <int, int>
  void prefetch() const {}
  auto column(int j) const {
    const __m512 times = _mm512_loadu_ps(step + LANES * j), add = _mm512_loadu_ps(middle + LANES * j);
    return [=](int i, __m512 sum) {
      if (i >= count) return;
      sum = _mm512_mul_ps(sum, _mm512_set1_ps(inverse[i]));
      _mm512_storeu_ps(out + i * stride + LANES * j, _mm512_fmadd_ps(sum, times, add));
    };
  }
};

// One head of one image. Keys and values lie as weights do: in panels of up to 64 keys (of up to 64 channels), and in a
// panel as (channels / 4, keys, 4) (as (keys / 4, channels, 4)).
struct Head {
  int tokens, padded, depth, size, weight_stride;
  float *scores, *factor, *correction, *step, *middle, *mean, *row, *query_scale;
  uint8_t *queries, *weights, *bytes;
  int8_t *keys, *values;

  // Without memory it only counts the bytes that it needs.
  int64_t place(uint8_t* memory, int token_count, int head_size, int asked) {
    tokens = token_count, size = head_size;
    padded = int(rounded_up(tokens, LANES)), depth = int(rounded_up(tokens, 4)), weight_stride = int(rounded_up(tokens, 64));
    int64_t used = 0;
    auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + used);
      used += rounded_up(count * int64_t(sizeof(*pointer)), 64);
    };
    take(scores, TALL * padded), take(factor, padded), take(correction, padded);
    take(step, size), take(middle, size), take(mean, size), take(row, size), take(query_scale, rounded_up(asked, TALL));
    take(queries, rounded_up(asked, TALL) * size), take(weights, TALL * weight_stride), take(bytes, LANES * size);
    take(keys, int64_t(padded) * size), take(values, int64_t(depth) * size);
    return used;
  }

  // The first and the last vector of a panel of keys; panels are as wide as each other, or one narrower.
  int panels() const { return (padded / LANES + WIDE - 1) / WIDE; }
  int panel_start(int panel) const { return padded / LANES * panel / panels(); }

  // A row without what is to be taken off it, in bytes around 128. Returns the scale.
  float quantise(const Rows& rows, int i, const float* off, uint8_t* out) {
    __m512 most[4] = {};
    for_vectors(size, [&](int j, int n) {
      __m512 x = rows.at(i, j);
      if (off) x = _mm512_sub_ps(x, _mm512_loadu_ps(off + j));
      _mm512_storeu_ps(row + j, x);
      most[n] = _mm512_max_ps(most[n], _mm512_abs_ps(x));
    });
    const float largest = largest_of(most);
    const Range range(-largest * (128.0f / 127.0f), largest);
    range.store(row, size, out);
    return range.step;
  }

  void take_queries(const Rows& rows, int asked) {
    for (int i = 0; i < asked; i++) query_scale[i] = quantise(rows, i, nullptr, queries + i * size);
  }

  void take_keys(const Rows& rows, float over_root) {
    for (int start = 0; start < size; start += WIDE * LANES)
      with_vectors((size - start) / LANES, [&](auto vectors) {
        __m512 sums[vectors()] = {};
        for (int i = 0; i < tokens; i++)
          for (int v = 0; v < vectors(); v++) sums[v] = _mm512_add_ps(sums[v], rows.at(i, start + v * LANES));
        for (int v = 0; v < vectors(); v++)
          _mm512_storeu_ps(mean + start + v * LANES, _mm512_mul_ps(sums[v], _mm512_set1_ps(1.0f / tokens)));
      });
    for (int panel = 0; panel < panels(); panel++) {
      const int start = panel_start(panel) * LANES, width = panel_start(panel + 1) * LANES - start;
      auto* out = reinterpret_cast<uint32_t*>(keys + int64_t(start) * size);
      for (int i = 0; i < width; i += LANES) {
        for (int k = 0; k < LANES; k++) {
          const int key = start + i + k;
          if (key < tokens)
            factor[key] = over_root * quantise(rows, key, mean, bytes + k * size);
          else
            factor[key] = 0, std::memset(bytes + k * size, 128, size);
        }
        for (int j = 0; j < size; j += 64) {
          const int count = size - j < 64 ? (size - j) / 4 : LANES;
          __m512i square[LANES];
          for (int k = 0; k < LANES; k++)
            square[k] = _mm512_maskz_loadu_epi32((1u << count) - 1, bytes + k * size + j);
          transpose(square);
          for (int p = 0; p < count; p++)  // with a sign
            _mm512_storeu_si512(out + int64_t(j / 4 + p) * width + i,
                                _mm512_xor_si512(square[p], _mm512_set1_epi8(char(128))));
        }
      }
      // Queries are bytes around 128: what 128 everywhere would give is taken off.
      const __m512i middles = _mm512_set1_epi8(char(128));
      for (int j = 0; j < width; j += LANES) {
        __m512i sum = _mm512_setzero_si512();
        for (int p = 0; p < size / 4; p++) add_products(sum, middles, _mm512_loadu_si512(out + int64_t(p) * width + j));
        __m512 times = _mm512_loadu_ps(factor + start + j);
        _mm512_storeu_ps(correction + start + j, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), times, _mm512_setzero_ps()));
      }
    }
    for (int key = tokens; key < padded; key++) correction[key] = NEVER;
  }

  void take_values(const Rows& rows) {
    // Four keys of four channels in every 128 bits, turned.
    const __m512i turned = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    for (int start = 0; start < size; start += WIDE * LANES)
      with_vectors((size - start) / LANES, [&](auto vectors) {
        __m512 low[vectors()], high[vectors()];
        for (int v = 0; v < vectors(); v++) low[v] = high[v] = rows.at(0, start + v * LANES);
        for (int i = 1; i < tokens; i++)
          for (int v = 0; v < vectors(); v++) {
            __m512 x = rows.at(i, start + v * LANES);
            low[v] = _mm512_min_ps(low[v], x), high[v] = _mm512_max_ps(high[v], x);
          }
        for (int v = 0; v < vectors(); v++) {
          __m512 steps = _mm512_mul_ps(_mm512_sub_ps(high[v], low[v]), _mm512_set1_ps(1.0f / 254.0f));
          __mmask16 some = _mm512_cmp_ps_mask(steps, _mm512_setzero_ps(), _CMP_GT_OQ);
          _mm512_storeu_ps(step + start + v * LANES, steps);
          low[v] = _mm512_mul_ps(_mm512_add_ps(high[v], low[v]), _mm512_set1_ps(0.5f));
          high[v] = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), steps);
          _mm512_storeu_ps(middle + start + v * LANES, low[v]);
        }
        int8_t* out = values + int64_t(depth) * start;
        __m512 lost[vectors()] = {};  // by rounding, in steps
        for (int i = 0; i < depth; i += 4)
          for (int v = 0; v < vectors(); v++, out += 64) {
            __m512i whole[4] = {};
            for (int k = 0; k < 4 && i + k < tokens; k++) {
              __m512 x = _mm512_mul_ps(_mm512_sub_ps(rows.at(i + k, start + v * LANES), low[v]), high[v]);
              whole[k] = _mm512_cvtps_epi32(x);
              lost[v] = _mm512_add_ps(lost[v], _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            }
            __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]),
                                                _mm512_packs_epi32(whole[2], whole[3]));
            _mm512_storeu_si512(out, _mm512_shuffle_epi8(packed, turned));
          }
        for (int v = 0; v < vectors(); v++) {
          float *place = middle + start + v * LANES, *steps = step + start + v * LANES;
          __m512 each = _mm512_mul_ps(_mm512_loadu_ps(steps), _mm512_set1_ps(1.0f / tokens));
          _mm512_storeu_ps(place, _mm512_fmadd_ps(lost[v], each, _mm512_loadu_ps(place)));
        }
      });
  }

  // Softmax of a row of scores in bytes: its largest weight is 255. Returns their sum.
  float soften(const float* from, float scale, uint8_t* out) const {
    __m512 most[4] = {_mm512_loadu_ps(from), _mm512_loadu_ps(from), _mm512_loadu_ps(from), _mm512_loadu_ps(from)};
    for_vectors(padded, [&](int j, int n) { most[n] = _mm512_max_ps(most[n], _mm512_loadu_ps(from + j)); });
    const __m512 times = _mm512_set1_ps(scale), add = _mm512_set1_ps(7.99435344f - scale * largest_of(most));  // log2(255)
    store_bytes(padded, out, [&](int j) { return power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(from + j), times, add)); });
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < weight_stride; j += 64) add_products(sum, _mm512_loadu_si512(out + j), _mm512_set1_epi8(1));
    return float(_mm512_reduce_add_epi32(sum));
  }

  void attend(int asked, float* out, int64_t stride) {
    for (int i = 0; i < asked; i += TALL) {
      const int count = asked - i < TALL ? asked - i : TALL;
      for (int panel = 0; panel < panels(); panel++) {
        const int start = panel_start(panel) * LANES;
        with_vectors(panel_start(panel + 1) - panel_start(panel), [&](auto vectors) {
          multiply_tile<TALL, vectors()>(queries + i * size, size, size, keys + int64_t(start) * size,
                                         Scores{factor + start, correction + start, scores + start, padded});
        });
      }
      float inverse[TALL] = {};
      for (int k = 0; k < count; k++)
        inverse[k] = 1.0f / soften(scores + k * padded, query_scale[i + k], weights + k * weight_stride);
      for (int start = 0; start < size; start += WIDE * LANES)
        with_vectors((size - start) / LANES, [&](auto vectors) {
          multiply_tile<TALL, vectors()>(weights, weight_stride, depth, values + int64_t(depth) * start,
                                         Means{step + start, middle + start, inverse, out + i * stride + start, stride, count});
        });
    }
  }
};

}  // namespace

extern "C" {

// Bytes of memory that one thread needs.
int64_t attention_scratch(int tokens, int size, int asked) { return Head().place(nullptr, tokens, size, asked); }

// Self-attention: queries (B, asked, H, d) with rows `query_stride` apart, keys and values (B, T, 2, H, d), bf16 →
// (B, asked, H, d) float32.
void attention(const Bits* queries, int64_t query_stride, const Bits* keys, int64_t key_stride, float* out,
               uint8_t* scratch, int images, int tokens, int heads, int size, int asked, int threads) {
  const int width = heads * size;
  const float over_root = 1.44269504f / __builtin_sqrtf(float(size));
  const int64_t all = int64_t(images) * heads;
  const Rows query_rows{queries, query_stride}, key_rows{keys, key_stride};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; thread++) {
    Head head;
    head.place(scratch + thread * attention_scratch(tokens, size, asked), tokens, size, asked);
    std::memset(head.weights, 0, TALL * head.weight_stride);  // also what lies behind the last key
    for (int64_t n = all * thread / threads; n < all * (thread + 1) / threads; n++) {
      const int64_t image = n / heads;
      const int channel = int(n % heads) * size;
      head.take_queries(query_rows.moved(image * asked, channel), asked);
      head.take_keys(key_rows.moved(image * tokens, channel), over_root);
      head.take_values(key_rows.moved(image * tokens, width + channel));
      head.attend(asked, out + image * asked * width + channel, width);
    }
  }
}

}  // extern "C"
