// Operations on the rows of a step. A row's bits depend on its own numbers alone: full and partial vectors run the same
// instructions, and threads only share out whole rows or whole vectors.

#include "rows.h"

using namespace sluice;

namespace {

struct Pair {
  Vector first, second;
};

// x and y turned by the angle with cosine c and sine s.
inline Pair turn(Vector x, Vector y, Vector c, Vector s) {
  return {_mm256_fmsub_ps(x, c, _mm256_mul_ps(y, s)), _mm256_fmadd_ps(y, c, _mm256_mul_ps(x, s))};
}

inline void turn_head(float* first, float* second, const float* cos, const float* sin, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Pair turned = turn(_mm256_loadu_ps(first + i), _mm256_loadu_ps(second + i), _mm256_loadu_ps(cos + i),
                             _mm256_loadu_ps(sin + i));
    _mm256_storeu_ps(first + i, turned.first);
    _mm256_storeu_ps(second + i, turned.second);
  }
  if (i < count) {
    const __m256i lanes = first_lanes(count - i);
    const Pair turned = turn(_mm256_maskload_ps(first + i, lanes), _mm256_maskload_ps(second + i, lanes),
                             _mm256_maskload_ps(cos + i, lanes), _mm256_maskload_ps(sin + i, lanes));
    _mm256_maskstore_ps(first + i, lanes, turned.first);
    _mm256_maskstore_ps(second + i, lanes, turned.second);
  }
}

}  // namespace

// Names the sources that this library was built from.
SLUICE_EXPORT const char* sluice_source_hash() { return SLUICE_SOURCE_HASH; }

// Rows of `width` numbers, `parts` of them per outer row (heads, or 1); strides in numbers.
SLUICE_EXPORT void sluice_rms_norm(const float* in, int64_t in_row, int64_t in_part, float* out, int64_t out_row, int64_t out_part,
                     const float* weight, float eps, int64_t rows, int64_t parts, int64_t width, int64_t threads) {
  const bool worth = rows * parts * width >= kWorthThreads;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t i = 0; i < rows * parts; ++i) {
    const int64_t row = i / parts, part = i % parts;
    normalise(in + row * in_row + part * in_part, weight, eps, width, out + row * out_row + part * out_part);
  }
}

// hidden [rows, width] += delta, then out = its normalised rows; all dense.
SLUICE_EXPORT void sluice_add_rms_norm(float* hidden, const float* delta, const float* weight, float eps, float* out,
                                       int64_t rows, int64_t width, int64_t threads) {
  const bool worth = rows * width >= kWorthThreads;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    add_row(hidden + row * width, delta + row * width, width);
    normalise(hidden + row * width, weight, eps, width, out + row * width);
  }
}

// gate_up [rows, 2 * width] -> out [rows, width].
SLUICE_EXPORT void sluice_silu_and_multiply(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width,
                              int64_t threads) {
  constexpr int64_t kPiece = 512;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const bool worth = rows * width >= kWorthThreads / 4;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t i = 0; i < rows * pieces; ++i) {
    const int64_t row = i / pieces, begin = i % pieces * kPiece;
    const int64_t end = begin + kPiece < width ? begin + kPiece : width;
    const float* gate = gate_up + row * stride;
    gate_row(gate, gate + width, begin, end, out + row * width);
  }
}

// heads [rows, num_heads, 2 * half], turned in place; turns [rows, 2, half]: cosines, then sines.
SLUICE_EXPORT void sluice_rotate(float* heads, int64_t row_stride, int64_t head_stride, const float* turns, int64_t rows,
                   int64_t num_heads, int64_t half, int64_t threads) {
  const bool worth = rows * num_heads * half >= kWorthThreads;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float* cos = turns + row * 2 * half;
    for (int64_t head = 0; head < num_heads; ++head) {
      float* first = heads + row * row_stride + head * head_stride;
      turn_head(first, first + half, cos, cos + half, half);
    }
  }
}
