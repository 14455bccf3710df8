// Matrix products of rows rounded to 10 bits and int8 weights.
//
// Contract: a row is rounded by its own largest magnitude, its products with a column are summed as whole numbers, which is
// exact in any order, and the sum is scaled by one multiplication. So the bits of a row depend on nothing beside it, and the
// shape of the tiles is free.
//
// A pair of neighbouring inputs, as two 16-bit numbers, goes through one multiply-add: as fast as the 8-bit instruction
// would be, whose 16-bit sums overflow with full 8-bit weights, and with room for finer rows.
//
// A product is one call, and one region of threads: what comes before it, rounding, the sums.
//
// Weights lie in panels of kColumns outputs: [panels][pairs of inputs][kColumns][2].

#include <omp.h>

#include <cstring>

#include "calls.h"
#include "rows.h"

using namespace sluice;

namespace {

constexpr int64_t kColumns = 16;
constexpr int64_t kRows = 6;          // of a tile: with 2 vectors of columns each, sums fill 12 of 16 registers
constexpr int64_t kRowsAtOnce = 120;  // rows that stay in the second cache while the weights pass by
constexpr float kLevels = 511.0f;     // a row's largest magnitude becomes this

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

// Writes the row as whole numbers, padded with a zero to an even width; returns what one of them stands for: nothing for a row
// of zeros, not a number for one with something that is not finite, whose whole numbers are zeros.
inline float round_row(const float* row, int64_t width, int16_t* out) {
  const float largest = largest_magnitude(row, width);
  const bool is_zero = largest < 1e-30f, is_finite = largest <= 3.4028235e38f;
  const Vector factor = _mm256_set1_ps(is_zero || !is_finite ? 0.0f : kLevels / largest);
  int64_t i = 0;
  if (is_zero || !is_finite) {
    std::memset(out, 0, (width + width % 2) * sizeof(int16_t));
    return is_finite ? 0.0f : NAN;
  }
  for (; i + kLanes <= width; i += kLanes)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), round_eight(_mm256_loadu_ps(row + i), factor));
  if (i < width) {
    int16_t last[kLanes];
    const Vector x = _mm256_maskload_ps(row + i, first_lanes(width - i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(last), round_eight(x, factor));
    std::memcpy(out + i, last, (width + width % 2 - i) * sizeof(int16_t));
  }
  return largest / kLevels;
}

struct Product {
  const int16_t* rows;
  const float* row_scales;
  const int8_t* weights;
  const float *scales, *bias;
  float* out;
  int64_t pairs, outputs;
};

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

// Rows [row, row + R) times one panel.
template <int R>
void multiply_tile(const Product& product, int64_t row, int64_t panel) {
  const int16_t* rows = product.rows + row * 2 * product.pairs;
  const int8_t* weights = product.weights + panel * product.pairs * 2 * kColumns;
  __m256i sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int64_t pair = 0; pair < product.pairs; ++pair) {
    const __m256i low = widen(weights + pair * 2 * kColumns), high = widen(weights + pair * 2 * kColumns + kColumns);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int16_t* at = rows + 2 * (r * product.pairs + pair);
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
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(product, row + r, panel * kColumns, sums[r][0]);
    store(product, row + r, panel * kColumns + kLanes, sums[r][1]);
  }
}

void multiply_rows(const Product& product, int64_t row, int64_t count, int64_t panel) {
  switch (count) {
    case 6: return multiply_tile<6>(product, row, panel);
    case 5: return multiply_tile<5>(product, row, panel);
    case 4: return multiply_tile<4>(product, row, panel);
    case 3: return multiply_tile<3>(product, row, panel);
    case 2: return multiply_tile<2>(product, row, panel);
    default: return multiply_tile<1>(product, row, panel);
  }
}

void multiply_all(const Product& product, int64_t num_rows) {
  const int64_t panels = (product.outputs + kColumns - 1) / kColumns;
  for (int64_t first = 0; first < num_rows; first += kRowsAtOnce) {
    const int64_t count = num_rows - first < kRowsAtOnce ? num_rows - first : kRowsAtOnce;
    const int64_t tiles = (count + kRows - 1) / kRows;
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = tile * count / tiles, end = (tile + 1) * count / tiles;
        multiply_rows(product, first + begin, end - begin, panel);
      }
  }
}

int64_t even(int64_t width) { return width + width % 2; }

// Rounds what `prepare(row, scratch)` gives for each row, and multiplies. The workspace holds whole numbers, their scales and
// a row for each thread.
template <typename Prepare>
void round_and_multiply(const SluiceInt8& weight, int64_t num_rows, char* workspace, float* out, int64_t threads,
                        Prepare prepare) {
  const int64_t width = even(weight.inputs);
  float* row_scales = reinterpret_cast<float*>(workspace);
  float* scratch = row_scales + num_rows;
  int16_t* rows = reinterpret_cast<int16_t*>(scratch + threads * weight.inputs);
  const Product product = {rows, row_scales, weight.weights, weight.scales, weight.bias, out, width / 2, weight.outputs};
  const bool worth = num_rows * weight.outputs * weight.inputs >= kWorthThreads;
#pragma omp parallel num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const float* prepared = prepare(row, scratch + omp_get_thread_num() * weight.inputs);
      row_scales[row] = round_row(prepared, weight.inputs, rows + row * width);
    }
    multiply_all(product, num_rows);
  }
}

}  // namespace

// Bytes of the workspace of a product.
SLUICE_EXPORT int64_t sluice_int8_workspace_size(const SluiceInt8* weight, int64_t num_rows, int64_t threads) {
  return (num_rows + threads * weight->inputs) * sizeof(float) + num_rows * even(weight->inputs) * sizeof(int16_t);
}

// out [num_rows, outputs] = rows x weight.
SLUICE_EXPORT void sluice_int8_rows(const SluiceInt8* weight, const float* rows, int64_t stride, int64_t num_rows,
                                    char* workspace, float* out, int64_t threads) {
  round_and_multiply(*weight, num_rows, workspace, out, threads, [=](int64_t row, float*) { return rows + row * stride; });
}

// hidden [num_rows, inputs] += delta, if there is one; out = its normalised rows x weight.
SLUICE_EXPORT void sluice_int8_after_norm(const SluiceInt8* weight, float* hidden, const float* delta, const float* norm,
                                          float eps, int64_t num_rows, char* workspace, float* out, int64_t threads) {
  const int64_t width = weight->inputs;
  round_and_multiply(*weight, num_rows, workspace, out, threads, [=](int64_t row, float* scratch) {
    if (delta) add_row(hidden + row * width, delta + row * width, width);
    normalise(hidden + row * width, norm, eps, width, scratch);
    return scratch;
  });
}

// out = silu(gate) * up x weight, of gate_up [num_rows, 2 * inputs].
SLUICE_EXPORT void sluice_int8_after_gate(const SluiceInt8* weight, const float* gate_up, int64_t stride, int64_t num_rows,
                                          char* workspace, float* out, int64_t threads) {
  const int64_t width = weight->inputs;
  round_and_multiply(*weight, num_rows, workspace, out, threads, [=](int64_t row, float* scratch) {
    const float* gate = gate_up + row * stride;
    gate_row(gate, gate + width, 0, width, scratch);
    return scratch;
  });
}
