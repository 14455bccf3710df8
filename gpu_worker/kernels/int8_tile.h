// What a tile of rows and a panel of weights give. The contract stands in int8.cpp.
#pragma once

#include "int8_rows.h"

namespace sluice {

constexpr int64_t kColumns = 16;
constexpr int64_t kPiecePairs = kPiece / 2;

struct Product {
  const int16_t* rows;
  const float* row_scales;
  const int8_t* weights;
  const float *scales, *bias;
  float* out;
  int64_t row_size, pairs, outputs;  // row_size: numbers that a row takes in `rows`

  const int16_t* tile(int64_t row) const { return rows + row * row_size; }
  const int8_t* panel(int64_t index) const { return weights + index * pairs * 2 * kColumns; }
};

// With few rows the processor itself fetches ahead as fast as memory gives; with more it is late.
constexpr int kRowsToFetchAhead = 5;

// Weights [at, at + 128) of those that come soon, also of the next panel.
inline void fetch_ahead(const int8_t* at) {
  constexpr int64_t kAhead = 2048;
  _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead + 64, _MM_HINT_T0);
}

inline __m256i widen(const int8_t* at) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

inline void store(const Product& product, int64_t row, int64_t column, __m256i sums) {
  if (column >= product.outputs) return;
  const Vector scale = _mm256_mul_ps(_mm256_loadu_ps(product.scales + column), _mm256_set1_ps(product.row_scales[row]));
  Vector result = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale);
  if (product.bias) result = _mm256_add_ps(result, _mm256_loadu_ps(product.bias + column));
  float* out = product.out + row * product.outputs + column;
  if (column + kLanes <= product.outputs) return _mm256_storeu_ps(out, result);
  _mm256_maskstore_ps(out, first_lanes(product.outputs - column), result);
}

// Rows [row, row + R), which are a tile, times one panel. With 2 vectors of columns each, sums of 6 rows fill 12 of 16
// registers.
struct Avx2 {
  static constexpr int64_t kRows = 6;

  template <int R>
  static void multiply(const Product& product, int64_t row, int64_t panel) {
    const int16_t* rows = product.tile(row);
    const int8_t* weights = product.panel(panel);
    __m256i sums[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    for (int64_t left = product.pairs; left > 0; left -= kPiecePairs, rows += R * kPiece) {
      const int64_t count = left < kPiecePairs ? left : kPiecePairs;
      for (int64_t pair = 0; pair < count; ++pair, weights += 2 * kColumns) {
        const __m256i low = widen(weights), high = widen(weights + kColumns);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int16_t* at = rows + r * kPiece + 2 * pair;
          __m256i x, products;
          asm("vpbroadcastd %[at], %[x]\n\t"
              "vpmaddwd %[low], %[x], %[products]\n\t"
              "vpaddd %[products], %[first], %[first]\n\t"
              "vpmaddwd %[high], %[x], %[x]\n\t"
              "vpaddd %[x], %[second], %[second]"
              : [first] "+x"(sums[r][0]), [second] "+x"(sums[r][1]), [x] "=&x"(x), [products] "=&x"(products)
              : [low] "x"(low), [high] "x"(high), [at] "m"(*reinterpret_cast<const int32_t*>(at)));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(product, row + r, panel * kColumns, sums[r][0]);
      store(product, row + r, panel * kColumns + kLanes, sums[r][1]);
    }
  }
};

}  // namespace sluice
