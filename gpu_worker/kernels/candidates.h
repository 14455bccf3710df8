// The candidates of one row of logits: the few tokens that can be drawn, found by comparisons alone and without a sort.
#pragma once

#include <functional>

#include "row_weights.h"

namespace sluice {

constexpr int64_t kMaxGrouped = 128;
constexpr int32_t kBuckets = 1024;

struct Member {
  float logit, weight;
};

// Memory of one thread, for one row at a time. Candidates are in vocabulary order; behind the last weight stand zeros up to a
// whole vector.
struct Scratch {
  double* sums;      // [chunks]
  double* masses;    // [kBuckets]
  Member* members;   // [room]: width in whole chunks, and a vector that packing may write behind
  float* maxima;     // [8 * chunks]
  float* logits;     // [room]
  float* weights;    // [room]
  int32_t* token_ids;  // [room]
  int32_t* buckets;  // [room]
  int64_t count;
};

inline int64_t room_of(int64_t width) { return num_chunks(width) * kChunk + kLanes; }

inline int64_t scratch_size(int64_t width) {
  const int64_t bytes = num_chunks(width) * (8 + kLanes * 4) + kBuckets * 8 + room_of(width) * (8 + 4 * 4);
  return (bytes + 63) / 64 * 64;
}

inline Scratch make_scratch(char* memory, int64_t width) {
  const int64_t room = room_of(width);
  Scratch scratch{};
  scratch.sums = reinterpret_cast<double*>(memory);
  scratch.masses = scratch.sums + num_chunks(width);
  scratch.members = reinterpret_cast<Member*>(scratch.masses + kBuckets);
  scratch.maxima = reinterpret_cast<float*>(scratch.members + room);
  scratch.logits = scratch.maxima + num_chunks(width) * kLanes;
  scratch.weights = scratch.logits + room;
  scratch.token_ids = reinterpret_cast<int32_t*>(scratch.weights + room);
  scratch.buckets = scratch.token_ids + room;
  return scratch;
}

// For each set of lanes the permutation that brings them to the front in order.
struct PackTable {
  int32_t order[1 << kLanes][kLanes];

  constexpr PackTable() : order() {
    for (int lanes = 0; lanes < 1 << kLanes; ++lanes) {
      int count = 0;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (lanes >> lane & 1) order[lanes][count++] = lane;
      }
    }
  }
};

alignas(32) constexpr PackTable kPack;

// Candidates: all tokens whose logit less `origin` is at least `least`. Minus infinity is none.
inline void collect(const float* logits, int64_t width, const Weigher& weigher, float origin, float least, Scratch& scratch) {
  const Vector bound = _mm256_set1_ps(std::max(least, -std::numeric_limits<float>::max()));
  const Vector start = _mm256_set1_ps(origin);
  const auto lanes_above = [&](Vector x) { return lanes_where(_mm256_cmp_ps(_mm256_sub_ps(x, start), bound, _CMP_GE_OQ)); };
  const __m256i lane_ids = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < num_chunks(width); ++chunk) {
    if (!lanes_above(_mm256_loadu_ps(scratch.maxima + chunk * kLanes))) continue;
    const int64_t end = std::min((chunk + 1) * kChunk, width);
    for (int64_t i = chunk * kChunk; i < end; i += kLanes) {
      const Vector x = load_logits(logits + i, end - i);
      const int lanes = lanes_above(x);
      if (!lanes) continue;
      const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPack.order[lanes]));
      const __m256i ids = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(i)), lane_ids);
      _mm256_storeu_ps(scratch.logits + count, _mm256_permutevar8x32_ps(x, order));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(scratch.token_ids + count), _mm256_permutevar8x32_epi32(ids, order));
      count += __builtin_popcount(static_cast<unsigned>(lanes));
    }
  }
  scratch.count = count;
  weigher.weigh(scratch.logits, count, scratch.weights);
}

// The k-th largest of `count` values, k <= count; `copy` is overwritten.
inline float kth_largest(const float* values, int64_t count, int64_t k, float* copy) {
  std::copy(values, values + count, copy);
  std::nth_element(copy, copy + k - 1, copy + count, std::greater<float>());
  return copy[k - 1];
}

// Takes the weight of candidates below a logit or a weight.
inline void drop_below(float floor, double least, Scratch& scratch) {
  const auto narrow = static_cast<float>(least);
  // The least 32-bit number that is not below `least`.
  const float bound = narrow < least ? std::nextafter(narrow, kInfinity) : narrow;
  for (int64_t i = 0; i < scratch.count; i += kLanes) {
    const Vector weight = _mm256_loadu_ps(scratch.weights + i);
    const Vector is_high = _mm256_cmp_ps(_mm256_loadu_ps(scratch.logits + i), _mm256_set1_ps(floor), _CMP_GE_OQ);
    const Vector is_heavy = _mm256_cmp_ps(weight, _mm256_set1_ps(bound), _CMP_GE_OQ);
    _mm256_storeu_ps(scratch.weights + i, _mm256_and_ps(weight, _mm256_and_ps(is_high, is_heavy)));
  }
}

// A value that at least k logits of the row reach: the k-th largest of at least as many maxima. Those of chunks are quickest
// and leave few candidates as long as k is well below their number, then those of groups, then the logits themselves.
inline float bound_of_largest(const float* logits, int64_t width, int64_t k, const Scratch& scratch) {
  const int64_t chunks = num_chunks(width), groups = chunks * kLanes;
  auto* copy = reinterpret_cast<float*>(scratch.members);
  if (2 * k <= chunks) {
    float* maxima = scratch.logits;  // no candidates are there yet
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      maxima[chunk] = max_lanes(_mm256_loadu_ps(scratch.maxima + chunk * kLanes));
    }
    return kth_largest(maxima, chunks, k, copy);
  }
  return k <= std::min(kMaxGrouped, groups) ? kth_largest(scratch.maxima, groups, k, copy)
                                            : kth_largest(logits, width, k, copy);
}

// Candidates: the k largest logits and the equals of the last, 1 <= k <= width.
inline void collect_largest(const float* logits, int64_t width, int64_t k, const Weigher& weigher, Scratch& scratch) {
  collect(logits, width, weigher, 0.0f, bound_of_largest(logits, width, k, scratch), scratch);
  if (scratch.count <= k) return;
  drop_below(kth_largest(scratch.logits, scratch.count, k, reinterpret_cast<float*>(scratch.members)), 0, scratch);
}

inline double sum_candidates(const Scratch& scratch) {
  LaneSum sum;
  for (int64_t i = 0; i < scratch.count; i += kLanes) sum.add(_mm256_loadu_ps(scratch.weights + i));
  return sum.total();
}

}  // namespace sluice
