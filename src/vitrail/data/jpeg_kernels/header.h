// The segments before the pixels of a JPEG: sizes, sampling, and the tables.
//
// Only what most photographs have is read: 8 bits, Huffman codes, one scan (baseline or extended sequential), one or
// three components. Everything else is refused, and the caller uses another decoder.

#pragma once

#include <cstdint>

#include "huffman.h"

namespace {

constexpr int BLOCK = 8;  // a block has 8 × 8 coefficients

constexpr uint8_t ZIGZAG[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

struct Component {
  int id, across, down;       // sampling factors
  const uint16_t* quantiser;  // 64 numbers in zigzag order
  const HuffmanTable *dc, *ac;
};

struct Header {
  int height = 0, width = 0, count = 0;  // `count` components
  int restart_interval = 0;              // in MCUs; 0: none
  Component components[3];
  const uint8_t* scan = nullptr;  // the first byte of the entropy-coded data
};

struct Tables {
  uint16_t quantisers[4][64];
  bool has_quantiser[4];
  HuffmanTable dc[4], ac[4];
};

inline int read_short(const uint8_t* at) { return at[0] << 8 | at[1]; }

inline bool read_quantisers(const uint8_t* at, const uint8_t* end, Tables& tables) {
  while (at < end) {
    int wide = *at >> 4, slot = *at & 15, bytes = wide ? 128 : 64;
    at++;
    if (wide > 1 || slot > 3 || end - at < bytes) return false;
    for (int i = 0; i < 64; i++) tables.quantisers[slot][i] = wide ? read_short(at + 2 * i) : at[i];
    tables.has_quantiser[slot] = true;
    at += bytes;
  }
  return true;
}

inline bool read_codes(const uint8_t* at, const uint8_t* end, Tables& tables) {
  while (at < end) {
    if (end - at < 17) return false;
    int is_ac = *at >> 4, slot = *at & 15, total = 0;
    for (int i = 1; i <= 16; i++) total += at[i];
    if (is_ac > 1 || slot > 3 || total > 256 || end - at < 17 + total) return false;
    HuffmanTable& table = is_ac ? tables.ac[slot] : tables.dc[slot];
    if (!table.build(at + 1, at + 17, is_ac)) return false;
    at += 17 + total;
  }
  return true;
}

inline bool read_frame(const uint8_t* at, const uint8_t* end, Header& header) {
  if (end - at < 6 || at[0] != 8 || header.count) return false;  // 8 bits a sample
  header.height = read_short(at + 1), header.width = read_short(at + 3), header.count = at[5];
  if (!header.height || !header.width || (header.count != 1 && header.count != 3)) return false;
  if (end - at != 6 + 3 * header.count) return false;
  for (int i = 0; i < header.count; i++) {
    Component& component = header.components[i];
    const uint8_t* entry = at + 6 + 3 * i;
    component.id = entry[0], component.across = entry[1] >> 4, component.down = entry[1] & 15;
    if (component.across < 1 || component.across > 2 || component.down < 1 || component.down > 2) return false;
    if (entry[2] > 3) return false;
    component.quantiser = reinterpret_cast<const uint16_t*>(uintptr_t(entry[2]));  // its slot, until the scan begins
  }
  if (header.count == 1) header.components[0].across = header.components[0].down = 1;  // a scan of one has no MCUs
  // The only three letters that mean RGB without a marker.
  return !(header.count == 3 && header.components[0].id == 'R');
}

inline bool read_scan(const uint8_t* at, const uint8_t* end, Header& header, const Tables& tables) {
  if (!header.count || end - at != 4 + 2 * header.count || at[0] != header.count) return false;
  for (int i = 0; i < header.count; i++) {
    Component& component = header.components[i];
    int dc = at[2 + 2 * i] >> 4, ac = at[2 + 2 * i] & 15;
    uintptr_t slot = reinterpret_cast<uintptr_t>(component.quantiser);
    if (at[1 + 2 * i] != component.id || dc > 3 || ac > 3 || !tables.has_quantiser[slot]) return false;
    component.quantiser = tables.quantisers[slot];
    component.dc = &tables.dc[dc], component.ac = &tables.ac[ac];
    if (!component.dc->ready || !component.ac->ready) return false;
  }
  const uint8_t* spectrum = at + 1 + 2 * header.count;
  return spectrum[0] == 0 && spectrum[1] == 63 && spectrum[2] == 0;
}

// Read all segments up to the first scan; false for what cannot be decoded here.
inline bool read_header(const uint8_t* data, int64_t size, Header& header, Tables& tables) {
  for (int i = 0; i < 4; i++) tables.has_quantiser[i] = tables.dc[i].ready = tables.ac[i].ready = false;
  const uint8_t *at = data, *end = data + size;
  if (size < 4 || at[0] != 0xff || at[1] != 0xd8) return false;
  if (end[-2] != 0xff || end[-1] != 0xd9) return false;  // perhaps cut short
  at += 2;
  while (end - at >= 4) {
    if (at[0] != 0xff) return false;
    if (at[1] == 0xff) {  // padding
      at++;
      continue;
    }
    int marker = at[1], length = read_short(at + 2);
    const uint8_t *body = at + 4, *next = at + 2 + length;
    if (length < 2 || end - at < 2 + length) return false;
    bool good = true;
    switch (marker) {
      case 0xdb: good = read_quantisers(body, next, tables); break;
      case 0xc4: good = read_codes(body, next, tables); break;
      case 0xc0: case 0xc1: good = read_frame(body, next, header); break;
      case 0xdd:
        good = length == 4;
        header.restart_interval = good ? read_short(body) : 0;
        break;
      case 0xee:  // Adobe's says in its twelfth byte how colours are stored: 1 is YCbCr
        good = !(length >= 14 && body[0] == 'A' && body[1] == 'd' && body[2] == 'o' && body[11] != 1);
        break;
      case 0xda:
        header.scan = next;
        return read_scan(body, next, header, tables);
      default:
        // Segments of applications and comments; all others are other kinds of JPEG.
        good = marker >= 0xe0 && marker <= 0xfe && !(marker >= 0xf0 && marker <= 0xfd);
    }
    if (!good) return false;
    at = next;
  }
  return false;
}

}  // namespace
