// Decode damaged JPEGs in a program that the compiler watches (AddressSanitizer): test_jpeg_damage.py builds and runs it.
//
// damaged_jpegs FOLDER COUNT SEED: take COUNT times a file of the folder, damage it at random, and decode a random
// rectangle of it. Prints how often each result came. A read or write outside of its memory ends the program.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

using Bytes = std::vector<uint8_t>;

extern "C" int decode_rectangle(const uint8_t*, int64_t, int, int, int, int, int, uint8_t*);

namespace {

std::mt19937 generator;

size_t draw(size_t below) { return generator() % std::max<size_t>(below, 1); }

// Flip a bit, replace a byte, remove or repeat a piece; often near the start, where the tables are.
void damage(Bytes& file) {
  for (size_t times = 1 + draw(8); times-- && file.size() > 100;) {
    size_t place = draw(draw(2) ? file.size() : 700) % file.size(), length = std::min(draw(64), file.size() - place);
    switch (draw(4)) {
      case 0: file[place] ^= 1 << draw(8); break;
      case 1: file[place] = uint8_t(draw(256)); break;
      case 2: file.erase(file.begin() + place, file.begin() + place + length); break;
      default: {
        Bytes piece(file.begin() + place, file.begin() + place + length);
        file.insert(file.begin() + draw(file.size()), piece.begin(), piece.end());
      }
    }
  }
}

// Height and width as the first frame header says, 0 if there is none.
void read_size(const Bytes& file, int& height, int& width) {
  height = width = 0;
  for (size_t at = 2; at + 9 < file.size() && file[at] == 0xff; at += 2 + (file[at + 2] << 8 | file[at + 3]))
    if (file[at + 1] == 0xc0 || file[at + 1] == 0xc1) {
      height = file[at + 5] << 8 | file[at + 6], width = file[at + 7] << 8 | file[at + 8];
      return;
    }
}

}  // namespace

int main(int, char** arguments) {
  std::vector<Bytes> files;
  for (auto& entry : std::filesystem::directory_iterator(arguments[1])) {
    std::ifstream stream(entry.path(), std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  generator.seed(atoi(arguments[3]));
  std::map<int, long> results;
  for (long i = 0, count = atol(arguments[2]); i < count; i++) {
    Bytes file = files[draw(files.size())];
    if (draw(4)) damage(file);
    int scale = 1 << draw(4), whole_height, whole_width;
    read_size(file, whole_height, whole_width);
    whole_height = (whole_height + scale - 1) / scale, whole_width = (whole_width + scale - 1) / scale;
    int most = draw(8) ? 64 : 2000;
    int height = std::clamp(int(1 + draw(most)), 1, std::max(whole_height, 1));
    int width = std::clamp(int(1 + draw(most)), 1, std::max(whole_width, 1));
    int top = draw(4) ? int(draw(whole_height - height + 1)) : whole_height - height;
    int left = draw(4) ? int(draw(whole_width - width + 1)) : whole_width - width;
    // Memory of exactly the right size, so that one byte too many is seen.
    std::unique_ptr<uint8_t[]> content(new uint8_t[file.size()]), pixels(new uint8_t[3 * size_t(height) * width]);
    memcpy(content.get(), file.data(), file.size());
    results[decode_rectangle(content.get(), int64_t(file.size()), scale, top, left, height, width, pixels.get())]++;
  }
  for (auto& [result, times] : results) printf("%d %ld\n", result, times);
}
