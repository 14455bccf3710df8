// What is done to the numbers of one row. Full and partial vectors run the same instructions.
#pragma once

#include <cmath>

#include "simd.h"

namespace sluice {

// Below this many numbers a second thread, which may have to wake up, costs more than it saves.
constexpr int64_t kWorthThreads = 65536;

inline Vector silu_and_multiply(Vector gate, Vector up) {
  const Vector denominator = _mm256_add_ps(_mm256_set1_ps(1.0f), exp_of(_mm256_sub_ps(_mm256_setzero_ps(), gate)));
  return _mm256_mul_ps(_mm256_div_ps(gate, denominator), up);
}

inline float sum_of_squares(const float* row, int64_t width) {
  Vector sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      const Vector x = _mm256_loadu_ps(row + i + part * kLanes);
      sums[part] = _mm256_fmadd_ps(x, x, sums[part]);
    }
  }
  for (; i < width; i += kLanes) {
    const Vector x = _mm256_maskload_ps(row + i, first_lanes(width - i));
    sums[0] = _mm256_fmadd_ps(x, x, sums[0]);
  }
  return sum_lanes(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

inline void normalise(const float* row, const float* weight, float eps, int64_t width, float* out) {
  const Vector scale = _mm256_set1_ps(1.0f / std::sqrt(sum_of_squares(row, width) / static_cast<float>(width) + eps));
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vector x = _mm256_mul_ps(_mm256_loadu_ps(row + i), scale);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(weight + i), x));
  }
  if (i < width) {
    const __m256i lanes = first_lanes(width - i);
    const Vector x = _mm256_mul_ps(_mm256_maskload_ps(row + i, lanes), scale);
    _mm256_maskstore_ps(out + i, lanes, _mm256_mul_ps(_mm256_maskload_ps(weight + i, lanes), x));
  }
}

// row += delta.
inline void add_row(float* row, const float* delta, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    _mm256_storeu_ps(row + i, _mm256_add_ps(_mm256_loadu_ps(row + i), _mm256_loadu_ps(delta + i)));
  for (; i < width; ++i) row[i] += delta[i];
}

// out = silu(gate) * up, numbers [begin, end) of a row.
inline void gate_row(const float* gate, const float* up, int64_t begin, int64_t end, float* out) {
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes)
    _mm256_storeu_ps(out + j, silu_and_multiply(_mm256_loadu_ps(gate + j), _mm256_loadu_ps(up + j)));
  if (j < end) {
    const __m256i lanes = first_lanes(end - j);
    const Vector value = silu_and_multiply(_mm256_maskload_ps(gate + j, lanes), _mm256_maskload_ps(up + j, lanes));
    _mm256_maskstore_ps(out + j, lanes, value);
  }
}

}  // namespace sluice
