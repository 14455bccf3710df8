// Rows as whole numbers of 10 bits, and how they lie in the workspace of a product.
//
// Rows that a tile takes together lie together, cut into pieces of one cache line: the first piece of each row, then the second
// of each, and so on. So a tile reads one line after the other, and its rows lie at distances that the compiler knows.
#pragma once

#include <cmath>
#include <cstring>

#include "simd.h"

namespace sluice {

constexpr int64_t kPiece = 32;     // whole numbers of 16 bits
constexpr float kLevels = 511.0f;  // a row's largest magnitude becomes this

inline int64_t padded(int64_t width) { return (width + kPiece - 1) / kPiece * kPiece; }

inline __m256i magnitude_bits(const float* at) {
  return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _mm256_set1_epi32(0x7fffffff));
}

inline int32_t max_lanes(__m256i x) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

// The largest magnitude, compared by its bits: what is not a number counts as larger than any.
inline float largest_magnitude(const float* row, int64_t width) {
  __m256i largest = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) largest = _mm256_max_epi32(largest, magnitude_bits(row + i));
  int32_t bits = max_lanes(largest);
  for (; i < width; ++i) {
    int32_t one;
    std::memcpy(&one, row + i, sizeof one);
    one &= 0x7fffffff;
    bits = one > bits ? one : bits;
  }
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

inline __m128i round_eight(Vector x, Vector factor) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(x, factor));
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}

// Writes the row as whole numbers into its pieces, `step` numbers from one to the next, with zeros behind the last to the end
// of a vector; returns what one of them stands for: nothing for a row of zeros, not a number for one with something that is
// not finite, whose whole numbers are zeros.
inline float round_row(const float* row, int64_t width, int16_t* out, int64_t step) {
  const float largest = largest_magnitude(row, width);
  const bool is_zero = largest < 1e-30f, is_finite = largest <= 3.4028235e38f;
  if (is_zero || !is_finite) {
    for (int64_t i = 0; i < width; i += kPiece) std::memset(out + i / kPiece * step, 0, kPiece * sizeof(int16_t));
    return is_finite ? 0.0f : NAN;
  }
  const Vector factor = _mm256_set1_ps(kLevels / largest);
  const auto place = [=](int64_t i) { return reinterpret_cast<__m128i*>(out + i / kPiece * step + i % kPiece); };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) _mm_storeu_si128(place(i), round_eight(_mm256_loadu_ps(row + i), factor));
  if (i < width) _mm_storeu_si128(place(i), round_eight(_mm256_maskload_ps(row + i, first_lanes(width - i)), factor));
  return largest / kLevels;
}

// How rows are shared out among tiles of at most `most` rows, as evenly as it goes.
struct Tiles {
  int64_t num_rows, count;

  Tiles(int64_t rows, int64_t most) : num_rows(rows), count((rows + most - 1) / most) {}

  int64_t begin(int64_t tile) const { return tile * num_rows / count; }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  int64_t holding(int64_t row) const { return ((row + 1) * count - 1) / num_rows; }
};

}  // namespace sluice
