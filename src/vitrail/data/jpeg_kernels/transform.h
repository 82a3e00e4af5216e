// Inverse cosine transforms of a block, to 8 × 8, 4 × 4, 2 × 2 or 1 pixels.
//
// These are the integer transforms that decoders agree on, after Loeffler, Ligtenberg and Moschytz (1989): columns,
// then rows, in fixed point with 13 bits, of which 2 remain between the two. Every rounding is that of libjpeg, so the
// pixels are the same. Sums are unsigned, because those of damaged data overflow.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

// clang and GCC have different words for the same; GCC knows clang's from version 12 on.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Lanes{__VA_ARGS__})
#endif

namespace {

typedef uint32_t Lanes __attribute__((vector_size(32)));  // one number for each of 8 columns
typedef int32_t Signed __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(16)));

constexpr int FRACTION = 13, KEPT = 2, CENTRE = 128;

constexpr uint32_t fixed(double x) { return int(x * (1 << FRACTION) + (x < 0 ? -0.5 : 0.5)); }

inline int round_shift(uint32_t x, int bits) { return int(x + (1u << (bits - 1))) >> bits; }
inline uint8_t clamp(int x) { return x < 0 ? 0 : x > 255 ? 255 : x; }

// A transform of 8 numbers in each lane, with `FRACTION` more bits than its input, then rounded by `shift` bits.
inline __attribute__((always_inline)) void transform_lanes(Lanes* x, int shift) {
  Lanes middle = (x[2] + x[6]) * fixed(0.541196100);
  Lanes even2 = middle - x[6] * fixed(1.847759065), even3 = middle + x[2] * fixed(0.765366865);
  uint32_t half = 1u << (shift - 1);
  Lanes even0 = ((x[0] + x[4]) << FRACTION) + half, even1 = ((x[0] - x[4]) << FRACTION) + half;
  Lanes a0 = even0 + even3, a3 = even0 - even3, a1 = even1 + even2, a2 = even1 - even2;

  Lanes sum3 = x[7] + x[3], sum4 = x[5] + x[1];
  Lanes both = (sum3 + sum4) * fixed(1.175875602);
  Lanes outer = (x[7] + x[1]) * fixed(-0.899976223), inner = (x[5] + x[3]) * fixed(-2.562915447);
  sum3 = sum3 * fixed(-1.961570560) + both, sum4 = sum4 * fixed(-0.390180644) + both;
  Lanes b0 = x[7] * fixed(0.298631336) + outer + sum3, b1 = x[5] * fixed(2.053119869) + inner + sum4;
  Lanes b2 = x[3] * fixed(3.072711026) + inner + sum3, b3 = x[1] * fixed(1.501321110) + outer + sum4;

  auto shifted = [shift](Lanes y) { return Lanes(Signed(y) >> shift); };
  x[0] = shifted(a0 + b3), x[7] = shifted(a0 - b3), x[1] = shifted(a1 + b2), x[6] = shifted(a1 - b2);
  x[2] = shifted(a2 + b1), x[5] = shifted(a2 - b1), x[3] = shifted(a3 + b0), x[4] = shifted(a3 - b0);
}

inline __attribute__((always_inline)) void transpose(Lanes* x) {
  Lanes y[8], z[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = SHUFFLE(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    y[i + 1] = SHUFFLE(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      z[i + j] = SHUFFLE(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      z[i + j + 2] = SHUFFLE(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    x[i] = SHUFFLE(z[i], z[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = SHUFFLE(z[i], z[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Not inlined: the compiler would then keep the bits that are being read in memory.
__attribute__((noinline)) void write_8(const int16_t* block, uint8_t* out, int64_t stride) {
  Lanes x[8];
  for (int i = 0; i < 8; i++) {
    Shorts row;
    memcpy(&row, block + 8 * i, sizeof row);
    x[i] = Lanes(__builtin_convertvector(row, Signed));
  }
  transform_lanes(x, FRACTION - KEPT);
  transpose(x);
  transform_lanes(x, FRACTION + KEPT + 3);
  transpose(x);
  alignas(64) int32_t values[64];
  alignas(64) uint8_t pixels[64];
  memcpy(values, x, sizeof values);
  for (int i = 0; i < 64; i++) pixels[i] = clamp(values[i] + CENTRE);
  for (int i = 0; i < 8; i++) memcpy(out + i * stride, pixels + 8 * i, 8);
}

inline void write_4(const int16_t* block, uint8_t* out, int64_t stride) {
  // Coefficients of the fifth row and column are not used.
  auto transform = [](const auto* x, int step, int shift, int* y, int y_step) {
    uint32_t first = uint32_t(x[0]) << (FRACTION + 1);
    uint32_t even = x[2 * step] * fixed(1.847759065) - x[6 * step] * fixed(0.765366865);
    uint32_t x1 = x[step], x3 = x[3 * step], x5 = x[5 * step], x7 = x[7 * step];
    uint32_t odd0 = x7 * fixed(-0.211164243) + x5 * fixed(1.451774981) +
                    x3 * fixed(-2.172734803) + x1 * fixed(1.061594337);
    uint32_t odd1 = x7 * fixed(-0.509795579) + x5 * fixed(-0.601344887) +
                    x3 * fixed(0.899976223) + x1 * fixed(2.562915447);
    y[0] = round_shift(first + even + odd1, shift), y[3 * y_step] = round_shift(first + even - odd1, shift);
    y[y_step] = round_shift(first - even + odd0, shift), y[2 * y_step] = round_shift(first - even - odd0, shift);
  };
  int rows[4][8], pixels[4];
  for (int column = 0; column < 8; column++)
    if (column != 4) transform(block + column, 8, FRACTION - KEPT + 1, rows[0] + column, 8);
  for (int row = 0; row < 4; row++) {
    transform(rows[row], 1, FRACTION + KEPT + 3 + 1, pixels, 1);
    for (int column = 0; column < 4; column++) out[row * stride + column] = clamp(pixels[column] + CENTRE);
  }
}

inline void write_2(const int16_t* block, uint8_t* out, int64_t stride) {
  auto transform = [](const auto* x, int step, int shift, int* y, int y_step) {
    uint32_t first = uint32_t(x[0]) << (FRACTION + 2);
    uint32_t odd = x[7 * step] * fixed(-0.720959822) + x[5 * step] * fixed(0.850430095) +
              x[3 * step] * fixed(-1.272758580) + x[step] * fixed(3.624509785);
    y[0] = round_shift(first + odd, shift), y[y_step] = round_shift(first - odd, shift);
  };
  int rows[2][8], pixels[2];
  for (int column : {0, 1, 3, 5, 7}) transform(block + column, 8, FRACTION - KEPT + 2, rows[0] + column, 8);
  for (int row = 0; row < 2; row++) {
    transform(rows[row], 1, FRACTION + KEPT + 3 + 2, pixels, 1);
    for (int column = 0; column < 2; column++) out[row * stride + column] = clamp(pixels[column] + CENTRE);
  }
}

// Write a block of side × side pixels. `is_flat`: all coefficients but the first are 0.
__attribute__((noinline)) void write_block(const int16_t* block, int side, bool is_flat, uint8_t* out, int64_t stride) {
  if (is_flat) {
    uint8_t value = clamp(round_shift(block[0], 3) + CENTRE);
    for (int row = 0; row < side; row++) memset(out + row * stride, value, side);
  } else if (side == 8) {
    write_8(block, out, stride);
  } else if (side == 4) {
    write_4(block, out, stride);
  } else if (side == 2) {
    write_2(block, out, stride);
  } else {
    out[0] = clamp(round_shift(block[0], 3) + CENTRE);
  }
}

}  // namespace
