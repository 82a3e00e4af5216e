// Huffman codes of a JPEG, and the bits they are read from.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LOOKUP = 10;    // bits that one look into a table decodes; larger tables would leave the fastest cache
constexpr int END_RUN = 128;  // the run of an "end of block": beyond any block

// What a code means: a run of zeros, then a coefficient, whose bits follow the code.
struct Entry {
  uint8_t total;   // bits of the code and the coefficient; 0 if the code is longer than LOOKUP
  uint8_t length;  // bits of the code
  uint8_t bits;    // bits of the coefficient
  uint8_t run;     // zeros before it
};

// What one or two codes take, for blocks that are read past: two cost one look into the table.
struct Step {
  uint8_t total;   // bits of all; 0 if the first code is longer than LOOKUP
  uint8_t places;  // coefficients of all
  bool is_last;    // whether the block ends here
};

struct HuffmanTable {
  bool ready, is_ac;
  Entry entries[1 << LOOKUP];
  Step steps[1 << LOOKUP];  // only for AC
  uint32_t limits[17];  // codes of each length lie below this, aligned to 16 bits
  int32_t offsets[17];  // from a code to its place among the symbols
  uint8_t symbols[256];

  // `counts`: how many codes have 1, 2, …, 16 bits. False if these are more than there can be.
  bool build(const uint8_t* counts, const uint8_t* given, bool for_ac) {
    ready = false, is_ac = for_ac;
    Entry* next = entries;
    uint32_t code = 0;
    int place = 0;
    for (int length = 1; length <= 16; length++) {
      offsets[length] = place - int32_t(code);
      for (int i = 0; i < counts[length - 1]; i++, code++, place++) {
        symbols[place] = given[place];
        if (code >= 1u << length || (given[place] & 15) > (is_ac ? 10 : 11)) return false;
        if (!is_ac && given[place] > 11) return false;
        if (length > LOOKUP) continue;
        Entry entry = make_entry(length, given[place]);
        for (int copies = 1 << (LOOKUP - length); copies; copies--) *next++ = entry;
      }
      limits[length] = code << (16 - length);
      code <<= 1;
    }
    while (next < entries + (1 << LOOKUP)) *next++ = Entry{};
    if (is_ac)
      for (int front = 0; front < 1 << LOOKUP; front++) steps[front] = make_step(front);
    return ready = true;
  }

  // Find a code that is longer than LOOKUP; its total is 0 if there is none.
  Entry search(uint32_t front) const {
    int length = LOOKUP + 1;
    while (length <= 16 && front >= limits[length]) length++;
    if (length > 16) return Entry{};
    return make_entry(length, symbols[(offsets[length] + int32_t(front >> (16 - length))) & 255]);
  }

 private:
  Entry make_entry(int length, int symbol) const {
    int bits = symbol & 15, run = is_ac ? symbol >> 4 : 0;
    if (is_ac && bits == 0 && run != 15) run = END_RUN;
    return {uint8_t(length + bits), uint8_t(length), uint8_t(bits), uint8_t(run)};
  }

  Step make_step(uint32_t front) const {
    Entry first = entries[front];
    if (first.run == END_RUN) return {first.total, 0, true};
    Step step = {first.total, uint8_t(first.run + 1), false};
    if (!first.total || first.total >= LOOKUP) return step;
    Entry second = entries[front << first.total & ((1 << LOOKUP) - 1)];
    if (!second.total || first.total + second.length > LOOKUP) return step;
    step.total += second.total, step.is_last = second.run == END_RUN;
    if (!step.is_last) step.places += second.run + 1;
    return step;
  }
};

// Bits of the entropy-coded data, most significant first. Behind its end there are zeros.
struct BitReader {
  const uint8_t *at, *end;
  uint64_t buffer = 0;  // the next bits, from the top
  int held = 0;         // how many bits of the buffer are known
  int invented = 0;     // how many zeros were added behind the end

  BitReader(const uint8_t* at, const uint8_t* end) : at(at), end(end) {}

  bool has_overrun() const { return held < invented; }

  // Hold at least 32 bits: more than a code and its coefficient, or the two of a Step, have.
  inline __attribute__((always_inline)) void refill() {
    if (held >= 32) return;
    if (end - at >= 8) {
      uint64_t word;
      memcpy(&word, at, 8);
      word = __builtin_bswap64(word);
      if (!((~word - 0x0101010101010101u) & word & 0x8080808080808080u)) {  // no byte is 0xff
        buffer |= word >> held;
        at += (63 - held) >> 3, held |= 56;
        return;
      }
    }
    *this = refill_slowly(*this);
  }

  // A copy goes in and out, so that in the fast path all numbers stay in registers.
  static __attribute__((noinline)) BitReader refill_slowly(BitReader bits) {
    while (bits.held <= 56) {
      if (bits.end - bits.at >= 2 && (bits.at[0] != 0xff || bits.at[1] == 0)) {
        bits.buffer |= uint64_t(bits.at[0]) << (56 - bits.held);
        bits.at += bits.at[0] == 0xff ? 2 : 1;
      } else {  // a marker, or the end
        bits.invented += 8;
      }
      bits.held += 8;
    }
    return bits;
  }

  inline void drop(int bits) { buffer <<= bits, held -= bits; }

  // Read the code at the front and the coefficient behind it; false if no code begins like this.
  inline __attribute__((always_inline)) bool read(const HuffmanTable& table, int& run, int& value) {
    Entry entry = table.entries[buffer >> (64 - LOOKUP)];
    if (__builtin_expect(!entry.total, 0)) entry = table.search(buffer >> 48);
    uint64_t rest = buffer << entry.length;
    run = entry.run;
    // A coefficient that begins with 0 is negative: 2^bits − 1 less than its bits say.
    value = int((rest >> 1) >> (63 - entry.bits)) - int(~(int64_t(rest) >> 63) & ((1 << entry.bits) - 1));
    drop(entry.total);
    return entry.total;
  }

  // Go on behind the expected restart marker; false if it is not there.
  bool restart(int number) {
    if (held - invented >= 8 || end - at < 2 || at[0] != 0xff || at[1] != 0xd0 + number) return false;
    at += 2, buffer = 0, held = invented = 0;
    return true;
  }
};

}  // namespace
