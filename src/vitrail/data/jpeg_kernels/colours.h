// From the planes of a JPEG to rows of RGB: chroma is enlarged, then colours are converted, with libjpeg's roundings.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// The samples of one component around the part that is wanted.
struct Plane {
  uint8_t* samples;
  int64_t stride;
  int top, left;       // place of the first sample in the whole plane
  int height, width;   // of the whole plane
  int across, down;    // pixels for each sample, 1 or 2

  const uint8_t* row(int y) const { return samples + (std::clamp(y, 0, height - 1) - top) * stride; }
};

// Write the values of a component at pixels [left, left + width) of a row. `scratch` holds width + 8 numbers.
//
// Between two samples, values are mixed 3 to 1: this is the triangle filter that decoders use.
inline const uint8_t* enlarge_row(const Plane& plane, int y, int left, int width, uint16_t* scratch, uint8_t* out) {
  if (plane.across == 1 && plane.down == 1) return plane.row(y) + left - plane.left;
  int first = plane.across == 2 ? left / 2 - 1 : left;  // of the samples that are needed
  int count = plane.across == 2 ? (left + width - 1) / 2 + 2 - first : width;
  const uint8_t* near = plane.row(y / plane.down) - plane.left;
  const uint8_t* far = plane.down == 2 ? plane.row(y % 2 ? y / 2 + 1 : y / 2 - 1) - plane.left : near;
  int weight = plane.down == 2 ? 3 : 1, other = plane.down == 2 ? 1 : 0;
  int begin = std::max(first, 0), end = std::min(first + count, plane.width);
  for (int x = begin; x < end; x++) scratch[x - first] = weight * near[x] + other * far[x];
  for (int x = first; x < begin; x++) scratch[x - first] = scratch[begin - first];
  for (int x = end; x < first + count; x++) scratch[x - first] = scratch[end - 1 - first];
  if (plane.across == 1) {
    int half = y % 2 ? 2 : 1;
    for (int x = 0; x < width; x++) out[x] = (scratch[x] + half) >> 2;
    return out;
  }
  int shift = plane.down == 2 ? 4 : 2, even = plane.down == 2 ? 8 : 1, odd = plane.down == 2 ? 7 : 2;
  for (int i = 1; i < count - 1; i++) {
    out[2 * i - 2] = (3 * scratch[i] + scratch[i - 1] + even) >> shift;
    out[2 * i - 1] = (3 * scratch[i] + scratch[i + 1] + odd) >> shift;
  }
  return out + left % 2;
}

inline void convert_row(const uint8_t* y, const uint8_t* blue, const uint8_t* red, int width, uint8_t* __restrict out) {
  constexpr int HALF = 1 << 15;
  for (int x = 0; x < width; x++) {
    int b = blue[x] - 128, r = red[x] - 128;
    int values[3] = {y[x] + ((91881 * r + HALF) >> 16), y[x] + ((-22554 * b - 46802 * r + HALF) >> 16),
                     y[x] + ((116130 * b + HALF) >> 16)};
    for (int i = 0; i < 3; i++) out[3 * x + i] = std::clamp(values[i], 0, 255);
  }
}

}  // namespace
