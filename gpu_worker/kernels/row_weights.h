// The weights exp((logit - largest) / temperature) of one row of logits, in 32 bits.
//
// A weight depends on its logit, the largest logit and the temperature alone: any part of a row, and any selection of it, is
// weighed again to the same bits. Sums are made in 64 bits, per chunk in a fixed order and then over the chunks in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace sluice {

constexpr int64_t kChunk = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t num_chunks(int64_t width) { return (width + kChunk - 1) / kChunk; }

// `count` logits from 1 to 8, and minus infinity in the lanes behind them.
inline Vector load_logits(const float* logits, int64_t count) {
  if (count >= kLanes) return _mm256_loadu_ps(logits);
  const __m256i lanes = first_lanes(count);
  return _mm256_blendv_ps(_mm256_set1_ps(-kInfinity), _mm256_maskload_ps(logits, lanes), _mm256_castsi256_ps(lanes));
}

inline int lanes_where(Vector mask) { return _mm256_movemask_ps(mask); }

// A row's largest logit, and the largest of each group of `kChunk / kLanes`: lane l of `maxima[8 * chunk]` is that of the
// chunk's tokens l, l + 8, l + 16 and so on, which needs no shuffles. Not finite: NaN or an infinity is among them, and
// `largest` means nothing after a NaN.
struct Scan {
  float largest;
  bool is_finite;
};

inline Scan scan_row(const float* logits, int64_t width, float* maxima) {
  Vector largest = _mm256_set1_ps(-kInfinity);
  Vector spoiled[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};  // zero times what is not finite is NaN
  const Vector zero = _mm256_setzero_ps();
  for (int64_t chunk = 0; chunk < num_chunks(width); ++chunk) {
    const float* first = logits + chunk * kChunk;
    const int64_t count = std::min(kChunk, width - chunk * kChunk);
    Vector found[2] = {_mm256_set1_ps(-kInfinity), _mm256_set1_ps(-kInfinity)};
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      for (int part = 0; part < 2; ++part) {
        const Vector x = _mm256_loadu_ps(first + i + part * kLanes);
        found[part] = _mm256_max_ps(found[part], x);
        spoiled[part] = _mm256_fmadd_ps(x, zero, spoiled[part]);
      }
    }
    for (; i < count; i += kLanes) {
      const __m256i lanes = first_lanes(std::min(count - i, kLanes));
      found[0] = _mm256_max_ps(found[0], load_logits(first + i, count - i));
      spoiled[0] = _mm256_fmadd_ps(_mm256_maskload_ps(first + i, lanes), zero, spoiled[0]);
    }
    found[0] = _mm256_max_ps(found[0], found[1]);
    _mm256_storeu_ps(maxima + chunk * kLanes, found[0]);
    largest = _mm256_max_ps(largest, found[0]);
  }
  const Vector both = _mm256_add_ps(spoiled[0], spoiled[1]);
  return {max_lanes(largest), lanes_where(_mm256_cmp_ps(both, both, _CMP_UNORD_Q)) == 0};
}

// The first token whose logit is `largest`, which is in the row.
inline int64_t find_first(const float* logits, int64_t width, const float* maxima, float largest) {
  const Vector wanted = _mm256_set1_ps(largest);
  for (int64_t chunk = 0; chunk < num_chunks(width); ++chunk) {
    if (!lanes_where(_mm256_cmp_ps(_mm256_loadu_ps(maxima + chunk * kLanes), wanted, _CMP_EQ_OQ))) continue;
    const int64_t end = std::min((chunk + 1) * kChunk, width);
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      if (logits[i] == largest) return i;
    }
  }
  return -1;
}

// A sum in 64 bits whose order is that of its vectors.
class LaneSum {
 public:
  void add(Vector x) {
    low_ = _mm256_add_pd(low_, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high_ = _mm256_add_pd(high_, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }

  double total() const {
    const __m256d both = _mm256_add_pd(low_, high_);
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }

 private:
  __m256d low_ = _mm256_setzero_pd(), high_ = _mm256_setzero_pd();
};

// Temperatures below 1e-30 count as 1e-30, where every unequal logit already has weight 0.
class Weigher {
 public:
  Weigher(float largest, double temperature) : largest_(_mm256_set1_ps(largest)) {
    octaves_ = 1.44269504088896340736 / std::max(temperature, 1e-30);
    const float high = static_cast<float>(octaves_);
    high_ = _mm256_set1_ps(high);
    low_ = _mm256_set1_ps(static_cast<float>(octaves_ - high));
  }

  float largest() const { return _mm256_cvtss_f32(largest_); }

  // 2^(difference * log2(e) / temperature), within 2 units in the last place of a 32-bit difference; zero below the normal
  // numbers. The factor has two parts, so that far tokens are as exact as near ones.
  Vector weight(Vector logits) const {
    const Vector away = _mm256_sub_ps(logits, largest_);
    const Vector exponent = _mm256_mul_ps(away, high_);
    const Vector n = _mm256_round_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector fraction = _mm256_fmadd_ps(away, low_, _mm256_fmsub_ps(away, high_, n));
    const Vector power = _mm256_mul_ps(exp2_fraction(fraction), exp2_whole(n));
    return _mm256_and_ps(power, _mm256_cmp_ps(exponent, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
  }

  // The weights of `count` logits; `out` has room for whole vectors, and zeros behind the last.
  void weigh(const float* logits, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i += kLanes) _mm256_storeu_ps(out + i, weight(load_logits(logits + i, count - i)));
  }

  // The sum of each chunk of the row; returns that of all.
  double sum(const float* logits, int64_t width, double* sums) const {
    double total = 0;
    for (int64_t chunk = 0; chunk < num_chunks(width); ++chunk) {
      sums[chunk] = sum_chunk(logits + chunk * kChunk, std::min(kChunk, width - chunk * kChunk));
      total += sums[chunk];
    }
    return total;
  }

  // A difference from the largest logit that every token of at least `least` > 0 reaches, and hardly any other.
  float difference_of(double least) const {
    const double away = (std::log2(least) - 1e-4) / octaves_;
    return static_cast<float>(std::max(away, -static_cast<double>(std::numeric_limits<float>::max())));
  }

 private:
  double sum_chunk(const float* logits, int64_t count) const {
    LaneSum sum;
    for (int64_t i = 0; i < count; i += kLanes) sum.add(weight(load_logits(logits + i, count - i)));
    return sum.total();
  }

  Vector largest_, high_, low_;
  double octaves_;
};

}  // namespace sluice
