// Tiles of the fp32 product: R rows times P panels of kColumns outputs, in AVX2 and in AVX-512.
//
// Contract: kChain inputs after kChain inputs, an output is the sum of chains of fused multiply-adds, each in the order of its
// inputs and from zero on; the bias is added last. Its bits depend on its row and its column alone, so that every tile of every
// instruction set gives the same. One chain over all inputs would be as fast, but its rounding grows with their number.
#pragma once

#include "isa.h"
#include "simd.h"

namespace sluice {

constexpr int64_t kColumns = 16;  // of a panel: a row of a panel is one line of the cache
constexpr int64_t kChain = 128;

struct ProductTile {
  const float* rows;
  int64_t row_stride;
  const float* weights;  // of the first panel, at the first input
  int64_t panel_size;    // numbers of a panel
  int64_t inputs;
  float* out;
  int64_t out_stride;
  int64_t columns;    // of out, from the tile's first one on
  const float* bias;  // of all the tile's columns, or none; added behind the last input
  bool is_first;      // else the sums of the inputs before are in out
  const char* next;   // in the first of as many panels, this tile's share of what is fetched for the tiles to come
  int64_t next_step;  // bytes of it for each input
};

using Multiply = void (*)(const ProductTile&);

// Lines of a panel between the one in use and the one that is fetched. Few panels pass more quickly.
constexpr int64_t lines_ahead(int panels) { return 64 / panels; }

inline void fetch(const float* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
inline void fetch_to_second_cache(const char* at) { _mm_prefetch(at, _MM_HINT_T1); }

// All lines of out that a tile stores to, which lie far from each other, before it computes.
template <int R, int P>
inline void fetch_out(const ProductTile& tile) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) fetch(tile.out + r * tile.out_stride + p * kColumns);
}

inline int64_t end_of_chain(int64_t begin, int64_t inputs) { return begin + kChain < inputs ? begin + kChain : inputs; }

// The first `columns` of some numbers of a row.
inline Vector load(const float* out, int64_t columns) { return _mm256_maskload_ps(out, first_lanes(columns)); }

inline void store(float* out, int64_t columns, Vector sums) {
  if (columns >= kLanes) return _mm256_storeu_ps(out, sums);
  _mm256_maskstore_ps(out, first_lanes(columns), sums);
}

template <int R, int P>
void multiply_avx2(const ProductTile& tile) {
  constexpr int kVectors = P * kColumns / kLanes;
  Vector totals[R][kVectors];
  fetch_out<R, P>(tile);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] = tile.is_first ? _mm256_setzero_ps()
                                   : load(tile.out + r * tile.out_stride + v * kLanes, tile.columns - v * kLanes);
  const float* rows = tile.rows;
  const float* weights = tile.weights;
  const char* next = tile.next;
  const int64_t panel_bytes = tile.panel_size * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < tile.inputs;) {
    Vector sums[R][kVectors];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_setzero_ps();
    }
    for (const int64_t end = end_of_chain(i, tile.inputs); i < end; ++i, ++rows, weights += kColumns, next += tile.next_step) {
      Vector weight[kVectors];
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        const float* at = weights + v / 2 * tile.panel_size + v % 2 * kLanes;
        weight[v] = _mm256_load_ps(at);
        if (v % 2 == 0) {
          fetch(at + lines_ahead(P) * kColumns);
          fetch_to_second_cache(next + v / 2 * panel_bytes);
        }
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const Vector x = _mm256_set1_ps(rows[r * tile.row_stride]);
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_fmadd_ps(x, weight[v], sums[r][v]);
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm256_add_ps(totals[r][v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector result = tile.bias ? _mm256_add_ps(totals[r][v], _mm256_load_ps(tile.bias + v * kLanes)) : totals[r][v];
      store(tile.out + r * tile.out_stride + v * kLanes, tile.columns - v * kLanes, result);
    }
  }
}

SLUICE_AVX512 inline __mmask16 first_columns(int64_t count) {
  return count >= kColumns ? 0xffff : static_cast<__mmask16>((1 << count) - 1);
}

template <int R, int P>
SLUICE_AVX512 void multiply_avx512(const ProductTile& tile) {
  __m512 totals[R][P];
  fetch_out<R, P>(tile);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const float* out = tile.out + r * tile.out_stride + p * kColumns;
      totals[r][p] = tile.is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(first_columns(tile.columns - p * kColumns), out);
    }
  }
  const float* rows = tile.rows;
  const float* weights = tile.weights;
  const char* next = tile.next;
  const int64_t panel_bytes = tile.panel_size * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < tile.inputs;) {
    __m512 sums[R][P];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) sums[r][p] = _mm512_setzero_ps();
    }
    for (const int64_t end = end_of_chain(i, tile.inputs); i < end; ++i, ++rows, weights += kColumns, next += tile.next_step) {
      __m512 weight[P];
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) {
        weight[p] = _mm512_load_ps(weights + p * tile.panel_size);
        fetch(weights + p * tile.panel_size + lines_ahead(P) * kColumns);
        fetch_to_second_cache(next + p * panel_bytes);
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const __m512 x = _mm512_set1_ps(rows[r * tile.row_stride]);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) sums[r][p] = _mm512_fmadd_ps(x, weight[p], sums[r][p]);
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) totals[r][p] = _mm512_add_ps(totals[r][p], sums[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const __m512 result = tile.bias ? _mm512_add_ps(totals[r][p], _mm512_load_ps(tile.bias + p * kColumns)) : totals[r][p];
      float* out = tile.out + r * tile.out_stride + p * kColumns;
      _mm512_mask_storeu_ps(out, first_columns(tile.columns - p * kColumns), result);
    }
  }
}

}  // namespace sluice
