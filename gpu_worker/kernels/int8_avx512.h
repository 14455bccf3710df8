// A tile with AVX-512 and VNNI: one instruction multiplies a pair of inputs with 16 columns and adds, and does that in every
// cycle. The bits are those of the AVX2 tile: sums are exact, and each is scaled by the same operations.
#pragma once

#include "int8_tile.h"
#include "isa.h"

namespace sluice {

struct Avx512 {
  static constexpr int64_t kRows = 16;  // more keep the one multiplier no busier

  // Rows [row, row + R), which are a tile, times one panel.
  template <int R>
  SLUICE_AVX512 static void multiply(const Product& product, int64_t row, int64_t panel) {
    constexpr int kChains = R == 1 ? 4 : (R == 2 ? 2 : 1);  // sums of a row: a sum takes its next product four cycles later
    const int16_t* rows = product.tile(row);
    const int8_t* weights = product.panel(panel);
    __m512i sums[R][kChains];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) sums[r][chain] = _mm512_setzero_si512();
    int64_t left = product.pairs;
    for (; left >= kPiecePairs; left -= kPiecePairs, rows += R * kPiece)
      for (int pair = 0; pair < kPiecePairs; pair += 4, weights += 8 * kColumns) {
        if (R >= kRowsToFetchAhead) fetch_ahead(weights);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) add<R, kChains>(rows + 2 * (pair + i), weights + 2 * i * kColumns, sums, i % kChains);
      }
    for (; left > 0; --left, rows += 2, weights += 2 * kColumns) add<R, kChains>(rows, weights, sums, 0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) sums[r][0] = _mm512_add_epi32(sums[r][0], sums[r][chain]);
      store(product, row + r, panel * kColumns, sums[r][0]);
    }
  }

 private:
  // The pair of inputs at `rows` and the rows behind it.
  template <int R, int C>
  SLUICE_AVX512 static inline __attribute__((always_inline)) void add(const int16_t* rows, const int8_t* weights,
                                                                      __m512i (&sums)[R][C], int chain) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights)));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      asm("vpdpwssd %[at]%{1to16%}, %[wide], %[sum]"
          : [sum] "+v"(sums[r][chain])
          : [wide] "v"(wide), [at] "m"(*reinterpret_cast<const int32_t*>(rows + r * kPiece)));
  }

  SLUICE_AVX512 static inline __attribute__((always_inline)) void store(const Product& product, int64_t row, int64_t column,
                                                                        __m512i sums) {
    const int64_t left = product.outputs - column;
    const __mmask16 lanes = left < kColumns ? static_cast<__mmask16>((1 << left) - 1) : 0xffff;
    const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(product.scales + column), _mm512_set1_ps(product.row_scales[row]));
    __m512 result = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(lanes, sums), scale);
    if (product.bias) result = _mm512_add_ps(result, _mm512_loadu_ps(product.bias + column));
    _mm512_mask_storeu_ps(product.out + row * product.outputs + column, lanes, result);
  }
};

}  // namespace sluice
