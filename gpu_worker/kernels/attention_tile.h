// What rows do with one tile of keys: scores, weights, sums of values. The contract stands in attention.cpp.
#pragma once

#include "attention_memory.h"

namespace sluice {

template <int kRows, int kVectors, typename Stored>
inline void score_vectors(const float* query, int64_t query_stride, const Tile<Stored>& tile, int64_t first, int64_t head_dim,
                          float* scores) {
  Vector sums[kRows][kVectors];
  const Stored* key[kVectors];
  for (int j = 0; j < kVectors; ++j) key[j] = tile.keys[first + j];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) sums[r][j] = _mm256_setzero_ps();
  for (int64_t d = 0; d < head_dim;) {
    const int64_t end = d + kLanes < head_dim ? d + kLanes : head_dim;
    for (const char* ahead = tile.ahead->take(kLanes * kAheadLines<Stored>, query); d < end; ++d, ahead += Ahead::kLine * kAheadLines<Stored>) {
      fetch<Stored>(ahead);
      Vector q[kRows];  // and one vector of keys at a time: with the sums, 3 x 4 rows and vectors fill all 16 registers
      for (int r = 0; r < kRows; ++r) q[r] = _mm256_broadcast_ss(query + r * query_stride + d);
      for (int j = 0; j < kVectors; ++j) {
        const Vector k = load(key[j] + d * tile.key_stride);
        for (int r = 0; r < kRows; ++r) sums[r][j] = _mm256_fmadd_ps(q[r], k, sums[r][j]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) _mm256_storeu_ps(scores + r * kTile + j * kLanes, sums[r][j]);
}

// Scores of kRows rows for every vector that holds a key of `keys`.
template <int kRows, typename Stored>
void score(const Scratch& scratch, int64_t row, const Tile<Stored>& tile, const SluiceShape& shape, Range keys) {
  const int64_t stride = round_up(shape.head_dim, kLanes);
  const float* query = scratch.query + row * stride;
  float* scores = scratch.scores + row * kTile;
  int64_t j = keys.begin / kLanes;
  const int64_t end = (keys.end + kLanes - 1) / kLanes;
  for (; j + 4 <= end; j += 4)
    score_vectors<kRows, 4>(query, stride, tile, j, shape.head_dim, scores + j * kLanes);
  if (j + 2 <= end) {
    score_vectors<kRows, 2>(query, stride, tile, j, shape.head_dim, scores + j * kLanes);
    j += 2;
  }
  if (j < end) score_vectors<kRows, 1>(query, stride, tile, j, shape.head_dim, scores + j * kLanes);
}

inline Vector visible_lanes(int64_t vector, Range keys) {
  const __m256i below_end = first_lanes(keys.end - vector * kLanes);
  const __m256i below_begin = first_lanes(keys.begin - vector * kLanes);
  return _mm256_castsi256_ps(_mm256_andnot_si256(below_begin, below_end));
}

inline Vector hide(Vector x, Vector fill, int64_t vector, Range keys) {
  const bool is_whole = vector * kLanes >= keys.begin && (vector + 1) * kLanes <= keys.end;
  return is_whole ? x : _mm256_blendv_ps(fill, x, visible_lanes(vector, keys));
}

// A score x, which is scaled by 1 / softcap, becomes softcap * tanh(x).
inline void cap(const Scratch& scratch, int64_t row, Range keys, float softcap) {
  float* scores = scratch.scores + row * kTile;
  for (int64_t j = keys.begin / kLanes; j * kLanes < keys.end; ++j) {
    const Vector capped = tanh_of(_mm256_loadu_ps(scores + j * kLanes));
    _mm256_storeu_ps(scores + j * kLanes, _mm256_mul_ps(capped, _mm256_set1_ps(softcap)));
  }
}

// The row's maximum takes the scores of the tile in, and what was summed before is to be corrected for it.
inline float raise_maximum(const Scratch& scratch, int64_t row, Range keys) {
  const float* scores = scratch.scores + row * kTile;
  const Vector nothing = _mm256_set1_ps(kNothing);
  Vector maxima = nothing;
  for (int64_t j = keys.begin / kLanes; j * kLanes < keys.end; ++j)
    maxima = _mm256_max_ps(maxima, hide(_mm256_loadu_ps(scores + j * kLanes), nothing, j, keys));
  const float tile_max = max_lanes(maxima), before = scratch.max[row];
  const float max = tile_max > before ? tile_max : before;
  scratch.correction[row] = before == kNothing ? 0.0f : exp2_of_negative(before - max);
  scratch.max[row] = max;
  return max;
}

inline void add_to_sum(const Scratch& scratch, int64_t row, Vector weights) {
  scratch.sum[row] = std::fma(scratch.sum[row], scratch.correction[row], sum_lanes(weights));
}

// Scores become weights; the row's maximum and sum take the tile in.
inline void weigh(const Scratch& scratch, int64_t row, Range keys) {
  float* scores = scratch.scores + row * kTile;
  const Vector max = _mm256_set1_ps(raise_maximum(scratch, row, keys));
  Vector sums = _mm256_setzero_ps();
  for (int64_t j = keys.begin / kLanes; j * kLanes < keys.end; ++j) {
    const Vector weight = exp2_of_negative(_mm256_sub_ps(_mm256_loadu_ps(scores + j * kLanes), max));
    const Vector seen = hide(weight, _mm256_setzero_ps(), j, keys);
    sums = _mm256_add_ps(sums, seen);
    _mm256_storeu_ps(scores + j * kLanes, seen);
  }
  add_to_sum(scratch, row, sums);
}

template <int kRows, int kVectors, typename Stored>
inline void add_vectors(const Scratch& scratch, int64_t row, const Tile<Stored>& tile, int64_t value_stride, int64_t at,
                        Range keys) {
  Vector sums[kRows][kVectors];
  float* result = scratch.result + row * value_stride + at;
  const float* weights = scratch.scores + row * kTile;
  for (int r = 0; r < kRows; ++r) {
    const Vector correction = _mm256_set1_ps(scratch.correction[row + r]);
    for (int j = 0; j < kVectors; ++j)
      sums[r][j] = _mm256_mul_ps(_mm256_loadu_ps(result + r * value_stride + j * kLanes), correction);
  }
  for (int64_t i = keys.begin; i < keys.end;) {
    const Stored* value = tile.values[i / kLanes] + i % kLanes * value_stride + at;
    const int64_t end = (i / kLanes + 1) * kLanes < keys.end ? (i / kLanes + 1) * kLanes : keys.end;
    for (const char* ahead = tile.ahead->take(kLanes * kAheadLines<Stored>, value); i < end; ++i, value += value_stride, ahead += Ahead::kLine * kAheadLines<Stored>) {
      fetch<Stored>(ahead);
      Vector weight[kRows];
      for (int r = 0; r < kRows; ++r) weight[r] = _mm256_broadcast_ss(weights + r * kTile + i);
      for (int j = 0; j < kVectors; ++j) {
        const Vector v = load(value + j * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][j] = _mm256_fmadd_ps(weight[r], v, sums[r][j]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) _mm256_storeu_ps(result + r * value_stride + j * kLanes, sums[r][j]);
}

// result = result * correction + weights x values, for kRows rows that see the same keys.
template <int kRows, typename Stored>
void add_values(const Scratch& scratch, int64_t row, const Tile<Stored>& tile, int64_t value_stride, Range keys) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= value_stride; at += 4 * kLanes)
    add_vectors<kRows, 4>(scratch, row, tile, value_stride, at, keys);
  if (at + 2 * kLanes <= value_stride) {
    add_vectors<kRows, 2>(scratch, row, tile, value_stride, at, keys);
    at += 2 * kLanes;
  }
  if (at < value_stride) add_vectors<kRows, 1>(scratch, row, tile, value_stride, at, keys);
}

// Rows that share the registers of one pass, and the keys of the tile that each sees, none if empty.
struct Group {
  int64_t row, count;
  Range ranges[kGroup];

  bool is_same() const {
    for (int64_t r = 1; r < count; ++r)
      if (ranges[r].begin != ranges[0].begin || ranges[r].end != ranges[0].end) return false;
    return true;
  }

  Range all() const {
    Range keys = {kTile, 0};
    for (int64_t r = 0; r < count; ++r) {
      if (ranges[r].begin >= ranges[r].end) continue;
      keys.begin = ranges[r].begin < keys.begin ? ranges[r].begin : keys.begin;
      keys.end = ranges[r].end > keys.end ? ranges[r].end : keys.end;
    }
    return keys;
  }
};

template <typename Stored>
inline void score_group(const SluiceShape& shape, const Scratch& scratch, const Group& group, const Tile<Stored>& tile) {
  const Range all = group.all();
  if (all.begin >= all.end) return;
  switch (group.count) {
    case 3: score<3>(scratch, group.row, tile, shape, all); break;
    case 2: score<2>(scratch, group.row, tile, shape, all); break;
    default: score<1>(scratch, group.row, tile, shape, all);
  }
  for (int64_t r = 0; r < group.count; ++r) {
    if (group.ranges[r].begin >= group.ranges[r].end) continue;
    if (shape.softcap > 0.0f) cap(scratch, group.row + r, group.ranges[r], shape.softcap);
    weigh(scratch, group.row + r, group.ranges[r]);
  }
}

template <typename Stored>
inline void add_group(const SluiceShape& shape, const Scratch& scratch, const Group& group, const Tile<Stored>& tile) {
  const Range all = group.all();
  if (all.begin >= all.end) return;
  if (group.count == 3 && group.is_same()) return add_values<3>(scratch, group.row, tile, shape.value_stride, all);
  if (group.count == 2 && group.is_same()) return add_values<2>(scratch, group.row, tile, shape.value_stride, all);
  for (int64_t r = 0; r < group.count; ++r)
    if (group.ranges[r].begin < group.ranges[r].end)
      add_values<1>(scratch, group.row + r, tile, shape.value_stride, group.ranges[r]);
}

}  // namespace sluice
