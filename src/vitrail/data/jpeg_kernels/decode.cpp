// Decode a rectangle of a JPEG, at its full size or at a half, a quarter or an eighth of it.
//
// libjpeg decodes a picture from the first to the last row. Here, Huffman codes before the rectangle are only read
// past, and nothing behind it is looked at. The pixels are those of libjpeg for the whole picture, bit by bit.

#include <cstdlib>
#include <vector>

#include "colours.h"
#include "header.h"
#include "huffman.h"
#include "transform.h"

namespace {

constexpr size_t KEPT_BYTES = 16 << 20;  // larger buffers are freed after use


enum Result { DONE = 0, NOT_SUPPORTED = 1, DAMAGED = 2 };

// Where the blocks of one component go.
struct Target {
  Plane plane;
  int side;                        // pixels of a block
  int top, bottom, left, right;    // the blocks that are wanted, the last ones included
  int quantiser[64];             // in zigzag order
};

inline int divide_up(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// Read a block's coefficients past the first, into `block` if it is wanted. False if damaged.
template <bool IS_WANTED>
inline __attribute__((always_inline)) bool read_block(BitReader& given, const HuffmanTable& table, const int* quantiser,
                                                      int16_t* block, bool& is_flat) {
  BitReader bits = given;
  int k = 1, run, value;
  bool is_whole = true;
  while (k < 64) {
    bits.refill();
    if (!IS_WANTED) {
      Step step = table.steps[bits.buffer >> (64 - LOOKUP)];
      if (__builtin_expect(step.total && k + step.places < 64, 1)) {
        k += step.places;
        bits.drop(step.total);
        if (step.is_last) break;
        continue;
      }
    }
    if (__builtin_expect(!bits.read(table, run, value), 0)) {
      is_whole = false;
      break;
    }
    k += run;
    if (k >= 64) break;
    if (IS_WANTED) block[ZIGZAG[k]] = value * quantiser[k];
    k++;
  }
  is_flat = k == 1 + END_RUN;
  given = bits;
  return is_whole && (k <= 64 || k > END_RUN);
}

struct Decoder {
  const Header& header;
  Target targets[3];
  int most_across = 1, most_down = 1;

  explicit Decoder(const Header& header) : header(header) {
    for (int i = 0; i < header.count; i++) {
      most_across = std::max(most_across, header.components[i].across);
      most_down = std::max(most_down, header.components[i].down);
    }
  }

  // Find the blocks that a rectangle needs, in pixels of the picture at `side`/8 of its size. Returns the bytes that
  // they take; 0 if the sampling is not supported.
  size_t plan(int side, int top, int left, int height, int width) {
    size_t total = 0;
    for (int i = 0; i < header.count; i++) {
      const Component& component = header.components[i];
      Target& target = targets[i];
      Plane& plane = target.plane;
      int across = component.across, down = component.down, larger = side;
      // As in libjpeg: chroma of a smaller picture is taken from the transform rather than enlarged afterwards.
      while (larger < BLOCK && most_across * side % (across * larger * 2) == 0 &&
             most_down * side % (down * larger * 2) == 0)
        larger *= 2;
      target.side = larger;
      plane.across = most_across * side / (across * larger), plane.down = most_down * side / (down * larger);
      plane.width = divide_up(int64_t(header.width) * across * larger, most_across * BLOCK);
      plane.height = divide_up(int64_t(header.height) * down * larger, most_down * BLOCK);
      bool is_enlarged = plane.across > 1 || plane.down > 1;
      if (plane.across < 1 || plane.down < 1 || (is_enlarged && (side == 1 || plane.width <= 2 || i == 0))) return 0;
      int margin = is_enlarged ? 1 : 0;
      target.top = std::max(top / plane.down - margin, 0) / larger;
      target.left = std::max(left / plane.across - margin, 0) / larger;
      target.bottom = std::min((top + height - 1) / plane.down + margin, plane.height - 1) / larger;
      target.right = std::min((left + width - 1) / plane.across + margin, plane.width - 1) / larger;
      plane.top = target.top * larger, plane.left = target.left * larger;
      plane.stride = int64_t(target.right - target.left + 1) * larger;
      for (int k = 0; k < 64; k++) target.quantiser[k] = component.quantiser[k];
      total += plane.stride * (target.bottom - target.top + 1) * larger;
    }
    return total;
  }

  void place(uint8_t* memory) {
    for (int i = 0; i < header.count; i++) {
      Target& target = targets[i];
      target.plane.samples = memory;
      memory += target.plane.stride * (target.bottom - target.top + 1) * target.side;
    }
  }

  bool read(const uint8_t* end) {
    BitReader bits(header.scan, end);
    int columns = divide_up(header.width, most_across * BLOCK), rows = 0, predictions[3] = {};
    for (int i = 0; i < header.count; i++) rows = std::max(rows, targets[i].bottom / header.components[i].down + 1);
    int until_restart = header.restart_interval, restarts = 0;
    for (int row = 0; row < rows; row++) {
      for (int column = 0; column < columns; column++) {
        if (header.restart_interval && until_restart-- == 0) {
          if (!bits.restart(restarts++ & 7)) return false;
          until_restart = header.restart_interval - 1;
          std::fill(predictions, predictions + 3, 0);
        }
        for (int i = 0; i < header.count; i++)
          for (int y = 0; y < header.components[i].down; y++)
            for (int x = 0; x < header.components[i].across; x++)
              if (!read_one(bits, i, row * header.components[i].down + y, column * header.components[i].across + x,
                            predictions[i]))
                return false;
      }
      if (bits.has_overrun()) return false;
    }
    return true;
  }

  inline __attribute__((always_inline)) bool read_one(BitReader& bits, int i, int row, int column, int& prediction) {
    const Component& component = header.components[i];
    const Target& target = targets[i];
    int unused, difference;
    bool is_flat;
    bits.refill();
    if (!bits.read(*component.dc, unused, difference)) return false;
    prediction = int16_t(prediction + difference);
    bool is_wanted = row >= target.top && row <= target.bottom && column >= target.left && column <= target.right;
    if (!is_wanted) return read_block<false>(bits, *component.ac, nullptr, nullptr, is_flat);
    alignas(64) int16_t block[64] = {};
    if (!read_block<true>(bits, *component.ac, target.quantiser, block, is_flat)) return false;
    block[0] = prediction * target.quantiser[0];
    uint8_t* out = target.plane.samples + (row - target.top) * target.side * target.plane.stride +
                   (column - target.left) * target.side;
    write_block(block, target.side, is_flat, out, target.plane.stride);
    return true;
  }

  void write(int top, int left, int height, int width, uint8_t* out, uint16_t* scratch, uint8_t* chroma) {
    for (int y = top; y < top + height; y++, out += 3 * int64_t(width)) {
      const uint8_t* grey = enlarge_row(targets[0].plane, y, left, width, scratch, chroma);
      if (header.count == 1) {
        for (int x = 0; x < width; x++) out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = grey[x];
        continue;
      }
      const uint8_t* blue = enlarge_row(targets[1].plane, y, left, width, scratch, chroma);
      const uint8_t* red = enlarge_row(targets[2].plane, y, left, width, scratch, chroma + width + 8);
      convert_row(grey, blue, red, width, out);
    }
  }
};

}  // namespace

// `out`: (height, width, 3) bytes for the rectangle, given in pixels of the picture at 1/`scale` of its size.
extern "C" int decode_rectangle(const uint8_t* data, int64_t size, int scale, int top, int left, int height, int width,
                                uint8_t* out) {
  thread_local std::vector<uint8_t> memory;
  thread_local Tables tables;
  Header header;
  if (!read_header(data, size, header, tables)) return NOT_SUPPORTED;
  int whole_height = divide_up(header.height, scale), whole_width = divide_up(header.width, scale);
  if (top < 0 || left < 0 || height < 1 || width < 1 || top > whole_height - height || left > whole_width - width)
    return NOT_SUPPORTED;
  Decoder decoder(header);
  size_t bytes = decoder.plan(BLOCK / scale, top, left, height, width);
  if (!bytes) return NOT_SUPPORTED;
  size_t rows = width + 8;  // for enlarged chroma: two rows of bytes and one of numbers
  bytes += -bytes & 1;
  if (memory.size() < bytes + 4 * rows) memory.resize(bytes + 4 * rows);
  decoder.place(memory.data());
  bool is_whole = decoder.read(data + size);
  if (is_whole)
    decoder.write(top, left, height, width, out, reinterpret_cast<uint16_t*>(memory.data() + bytes),
                  memory.data() + bytes + 2 * rows);
  if (memory.size() > KEPT_BYTES) std::vector<uint8_t>().swap(memory);
  return is_whole ? DONE : DAMAGED;
}
