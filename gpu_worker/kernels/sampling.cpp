// Draws the next token of each row of logits, and measures rows for log probabilities.
//
// What a row gives depends on its own numbers alone: a row is computed by one thread, and nothing is summed across rows.
// Selection compares, which is exact; sums run in vocabulary order in 64 bits. gpu_worker/engine/draws.py and whole_rows.py
// say the same in numpy.

#include <omp.h>

#include "candidates.h"

using namespace sluice;

namespace {

constexpr int64_t kWorthThreads = 65536;

// How a row is drawn, as sampling.py packs it. temperature 0 takes the largest; top_k: 0 is off.
struct Draw {
  double temperature, top_k, top_p, min_p, uniform;
};

// Candidates: all tokens that top-p and min-p keep, and more. When the tokens of at least some weight reach the share, none of
// less weight is in the nucleus; and those of less than (1 - top_p) total / width do not have 1 - top_p together.
void collect_nucleus(const float* logits, int64_t width, const Draw& draw, double total, const Weigher& weigher,
                     Scratch& scratch) {
  const double least = std::max(0.5 * (1 - draw.top_p) * total / static_cast<double>(width), draw.min_p);
  for (const double share : {1e-4, 1e-5, 1e-6, 0.0}) {
    const double bound = std::max(share * total, least);
    if (bound > 1) continue;  // more than the largest has
    collect(logits, width, weigher, weigher.largest(), weigher.difference_of(bound), scratch);
    if (bound == least || sum_candidates(scratch) >= (draw.top_p + 1e-9) * total) return;
  }
}

// The smallest logit of the nucleus (arXiv:1904.09751): the fewest largest candidates whose weights reach `wanted`. Buckets of
// equal breadth find the place, so that only the members of one are sorted.
float nucleus_floor(float largest, double wanted, const Scratch& scratch) {
  const float lowest = *std::min_element(scratch.logits, scratch.logits + scratch.count);
  if (lowest == largest) return lowest;
  const float scale = std::min(static_cast<float>(kBuckets - 1) / (largest - lowest), std::numeric_limits<float>::max());
  for (int64_t i = 0; i < scratch.count; i += kLanes) {
    const Vector away = _mm256_sub_ps(_mm256_set1_ps(largest), _mm256_loadu_ps(scratch.logits + i));
    const Vector place = _mm256_min_ps(_mm256_mul_ps(away, _mm256_set1_ps(scale)), _mm256_set1_ps(kBuckets - 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scratch.buckets + i), _mm256_cvttps_epi32(place));
  }
  std::fill(scratch.masses, scratch.masses + kBuckets, 0.0);
  for (int64_t i = 0; i < scratch.count; ++i) scratch.masses[scratch.buckets[i]] += scratch.weights[i];
  double reached = 0;
  int32_t bucket = 0;
  while (bucket < kBuckets && reached + scratch.masses[bucket] < wanted) reached += scratch.masses[bucket++];
  if (bucket == kBuckets) return lowest;
  int64_t count = 0;
  for (int64_t i = 0; i < scratch.count; ++i) {
    if (scratch.buckets[i] == bucket) scratch.members[count++] = {scratch.logits[i], scratch.weights[i]};
  }
  std::sort(scratch.members, scratch.members + count, [](Member a, Member b) { return a.logit > b.logit; });
  int64_t last = 0;
  while (last < count - 1 && (reached += scratch.members[last].weight) < wanted) ++last;
  return scratch.members[last].logit;
}

// Index of the first weight at which the sum exceeds `target`; rounding can put that at the very end: then the last that is
// positive.
template <typename Number>
int64_t first_above(const Number* weights, int64_t count, double target, double& before) {
  double reached = 0;
  int64_t last = -1;
  before = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!(weights[i] > 0)) continue;
    before = reached;
    last = i;
    reached += weights[i];
    if (reached > target) break;
  }
  return last;
}

// The inverse of the cumulative distribution in two levels, chunks and then what is in one: `sums` are those of the chunks,
// and `weights_of(chunk)` gives the weights of one.
template <typename WeightsOf>
int64_t invert(const double* sums, int64_t width, double target, WeightsOf weights_of) {
  double before = 0, unused = 0;
  const int64_t chunk = first_above(sums, num_chunks(width), target, before);
  if (chunk < 0) return -1;
  const int64_t count = std::min(kChunk, width - chunk * kChunk);
  return chunk * kChunk + first_above(weights_of(chunk, count), count, target - before, unused);
}

int64_t draw_whole(const float* logits, int64_t width, double uniform, const Weigher& weigher, Scratch& scratch) {
  const double total = weigher.sum(logits, width, scratch.sums);
  return invert(scratch.sums, width, uniform * total, [&](int64_t chunk, int64_t count) {
    weigher.weigh(logits + chunk * kChunk, count, scratch.weights);
    return scratch.weights;
  });
}

int64_t draw_candidate(double uniform, Scratch& scratch) {
  double total = 0;
  for (int64_t chunk = 0; chunk < num_chunks(scratch.count); ++chunk) {
    LaneSum sum;
    const int64_t end = std::min((chunk + 1) * kChunk, scratch.count);
    for (int64_t i = chunk * kChunk; i < end; i += kLanes) sum.add(_mm256_loadu_ps(scratch.weights + i));
    total += scratch.sums[chunk] = sum.total();
  }
  const auto weights_of = [&](int64_t chunk, int64_t) { return scratch.weights + chunk * kChunk; };
  const int64_t place = invert(scratch.sums, scratch.count, uniform * total, weights_of);
  return place < 0 ? -1 : scratch.token_ids[place];
}

int64_t draw_row(const float* logits, int64_t width, const Draw& draw, Scratch& scratch) {
  const float largest = scan_row(logits, width, scratch.maxima).largest;
  if (!(std::abs(largest) < kInfinity)) return -1;
  if (draw.temperature == 0) return find_first(logits, width, scratch.maxima, largest);
  const Weigher weigher(largest, draw.temperature);
  const auto top_k = static_cast<int64_t>(draw.top_k);
  if (top_k == 0 && draw.top_p == 1 && draw.min_p == 0) return draw_whole(logits, width, draw.uniform, weigher, scratch);
  double total = 0;
  if (top_k > 0) {
    collect_largest(logits, width, std::min(top_k, width), weigher, scratch);
    total = sum_candidates(scratch);
  } else if (draw.top_p < 1) {
    total = weigher.sum(logits, width, scratch.sums);
    collect_nucleus(logits, width, draw, total, weigher, scratch);
  } else {
    collect(logits, width, weigher, largest, weigher.difference_of(draw.min_p), scratch);
  }
  const float floor = draw.top_p < 1 ? nucleus_floor(largest, draw.top_p * total, scratch) : -kInfinity;
  drop_below(floor, draw.min_p, scratch);
  return draw_candidate(draw.uniform, scratch);
}

struct Entry {
  float logit;
  int32_t token_id;
};

// The `limit` largest in descending order, of equals the first; the rest of the rows stays as it is.
void measure_row(const float* logits, int64_t width, int64_t limit, Scratch& scratch, double* log_total, int64_t* ids,
                 float* values) {
  const float largest = scan_row(logits, width, scratch.maxima).largest;
  const Weigher weigher(largest, 1.0);
  *log_total = static_cast<double>(largest) + std::log(weigher.sum(logits, width, scratch.sums));
  if (limit == 0) return;
  collect_largest(logits, width, limit, weigher, scratch);
  const auto entries = reinterpret_cast<Entry*>(scratch.members);
  for (int64_t i = 0; i < scratch.count; ++i) entries[i] = {scratch.logits[i], scratch.token_ids[i]};
  const auto is_before = [](Entry a, Entry b) { return a.logit != b.logit ? a.logit > b.logit : a.token_id < b.token_id; };
  std::partial_sort(entries, entries + limit, entries + scratch.count, is_before);
  for (int64_t i = 0; i < limit; ++i) {
    ids[i] = entries[i].token_id;
    values[i] = entries[i].logit;
  }
}

}  // namespace

// Bytes that one thread works in.
SLUICE_EXPORT int64_t sluice_sampling_scratch_size(int64_t width) { return scratch_size(width); }

// tokens[i] = the first largest of row i of logits [rows, width], or -1 where one of them is not finite.
SLUICE_EXPORT void sluice_find_best(const float* logits, int64_t rows, int64_t width, int64_t* tokens, char* memory,
                                    int64_t threads) {
  const bool worth = rows * width >= kWorthThreads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    const Scratch scratch = make_scratch(memory + omp_get_thread_num() * scratch_size(width), width);
    const Scan scan = scan_row(logits + i * width, width, scratch.maxima);
    tokens[i] = scan.is_finite ? find_first(logits + i * width, width, scratch.maxima, scan.largest) : -1;
  }
}

// tokens[i] = what draws[i] gives in row places[i] of logits [.., width]; -1 where no token has a weight.
SLUICE_EXPORT void sluice_draw_rows(const float* logits, const int64_t* places, const void* draws, int64_t rows, int64_t width,
                                    int64_t* tokens, char* memory, int64_t threads) {
  const bool worth = rows * width >= kWorthThreads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    Scratch scratch = make_scratch(memory + omp_get_thread_num() * scratch_size(width), width);
    tokens[i] = draw_row(logits + places[i] * width, width, static_cast<const Draw*>(draws)[i], scratch);
  }
}

// For row places[i] of logits [.., width]: the logarithm of the sum of its exponentials, and its limits[i] largest logits with
// their tokens in ids and values [rows, room].
SLUICE_EXPORT void sluice_measure_rows(const float* logits, const int64_t* places, const int64_t* limits, int64_t rows,
                                       int64_t width, double* log_totals, int64_t* ids, float* values, int64_t room,
                                       char* memory, int64_t threads) {
  const bool worth = rows * width >= kWorthThreads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    Scratch scratch = make_scratch(memory + omp_get_thread_num() * scratch_size(width), width);
    measure_row(logits + places[i] * width, width, limits[i], scratch, log_totals + i, ids + i * room, values + i * room);
  }
}
