// Paged attention over the packed rows of a step: one kernel for decodes and prefill chunks.
//
// Contract: the bits of a row depend on its own query and on the keys and values that it sees, by position, and on nothing
// else. So keys are cut into tiles on a grid that starts at position 0, and tiles into partitions; a score is one chain of
// fused multiply-adds over the head's elements, a result one chain over the keys of a tile; tiles are joined by an online
// softmax (arXiv:1805.02867), partitions in order. How many rows share a tile, and which thread takes which piece, changes
// who computes a chain, never the chain. A key that a row does not see is left out of its chain, not multiplied by zero:
// whatever lies there, NaN included, stays without influence.
//
// Keys and values are stored in fp32 or fp16 and computed with in fp32. Memory of a block: per KV head the keys transposed
// [head_dim][block_size], then the values [block_size][value_stride]; value_stride is head_dim rounded up to whole vectors.

#include <omp.h>

#include "attention_tile.h"

using namespace sluice;

namespace {

constexpr int64_t kWholeItems = 4;  // from so many items per thread on, a thread takes all heads of an item after one another
constexpr int64_t kDirectRows = 2 * kGroup;  // more rows than these read an fp16 tile faster when it is widened once

// Joins what one partition gave into what those before it gave.
void join(float* total, float* total_max, float* total_sum, const float* part, float part_max, float part_sum, int64_t width) {
  if (part_sum == 0.0f) return;  // it held no key that the row sees
  const float max = part_max > *total_max ? part_max : *total_max;
  const float old_share = *total_max == kNothing ? 0.0f : exp2_of_negative(*total_max - max);
  const float new_share = exp2_of_negative(part_max - max);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vector old_part = _mm256_mul_ps(_mm256_loadu_ps(total + i), _mm256_set1_ps(old_share));
    _mm256_storeu_ps(total + i, _mm256_fmadd_ps(_mm256_loadu_ps(part + i), _mm256_set1_ps(new_share), old_part));
  }
  *total_sum = std::fma(part_sum, new_share, *total_sum * old_share);
  *total_max = max;
}

void reset(float* results, float* max, float* sum, int64_t n, int64_t value_stride) {
  std::memset(results, 0, n * value_stride * sizeof(float));
  for (int64_t r = 0; r < n; ++r) max[r] = kNothing, sum[r] = 0.0f;
}

inline int64_t group_size(int64_t left) { return left == 4 ? 2 : (left < kGroup ? left : kGroup); }

Group make_group(const SluiceItem& item, int64_t row, int64_t n, int64_t heads, int64_t start, int64_t window) {
  Group group = {row, group_size(n - row), {}};
  for (int64_t r = 0; r < group.count; ++r)
    group.ranges[r] = visible(item.first_position + (row + r) / heads, start, window);
  return group;
}

// All scores before all values, so that one half of the tile stays in the first cache for every group.
template <typename Stored>
void take_tile(const SluiceStep& step, const SluiceItem& item, const Scratch& scratch, int64_t start, const Tile<Stored>& tile) {
  const int64_t heads = heads_per_kv_head(step.shape), n = item.num_rows * heads;
  for (int64_t row = 0; row < n; row += group_size(n - row))
    score_group(step.shape, scratch, make_group(item, row, n, heads, start, step.window), tile);
  for (int64_t row = 0; row < n; row += group_size(n - row))
    add_group(step.shape, scratch, make_group(item, row, n, heads, start, step.window), tile);
}

int64_t unit_size(const SluiceShape& shape) { return shape.block_size * (shape.head_dim + shape.value_stride); }

// Where the keys of an item lie, and from where on and up to where it reads them.
template <typename Stored>
struct Read {
  Sequence<Stored> sequence;
  int64_t begin, end;
};

template <typename Stored>
Read<Stored> read_of(const SluiceStep& step, const SluiceItem& item, const Stored* memory, int64_t kv_head) {
  const SluiceShape& shape = step.shape;
  const int64_t first_seen = step.window > 0 ? item.first_position - step.window + 1 : 0;
  const int64_t begin = item.first_partition * kPartition, limit = begin + item.num_partitions * kPartition;
  const int64_t end = item.first_position + item.num_rows;
  const Sequence<Stored> sequence = {memory + kv_head * unit_size(shape), shape.num_kv_heads * unit_size(shape),
                                     step.tables + item.table_start};
  return {sequence, first_seen > begin ? first_seen / kTile * kTile : begin, end < limit ? end : limit};
}

// `next`: what the thread reads after this, or nothing.
template <typename Stored>
void expect(const SluiceShape& shape, const Read<Stored>& read, const Read<Stored>* next, int64_t start, Ahead* ahead) {
  ahead->settle(shape.block_size);
  ahead->bytes = unit_size(shape) * sizeof(Stored);
  expect(shape, read.sequence, start, read.end, &ahead->reached_now, ahead);
  ahead->num_now = ahead->count;
  if (next) expect(shape, next->sequence, next->begin, next->end, &ahead->reached_then, ahead);
}

template <typename Stored>
void take_partition(const SluiceStep& step, const SluiceItem& item, const Read<Stored>& read, const Read<Stored>* next,
                    const Scratch& scratch, int64_t partition, Ahead* ahead) {
  const SluiceShape& shape = step.shape;
  const int64_t n = item.num_rows * heads_per_kv_head(shape), last_position = item.first_position + item.num_rows - 1;
  int64_t start = partition * kPartition;
  const int64_t end = start + kPartition < read.end ? start + kPartition : read.end;
  if (read.begin > start) start = read.begin;
  reset(scratch.result, scratch.max, scratch.sum, n, shape.value_stride);
  for (; start < end; start += kTile) {
    const Range first = visible(item.first_position, start, step.window);
    const Range all = {first.begin, visible(last_position, start, step.window).end};
    expect(shape, read, next, start + kTile, ahead);
    if (shape.block_size % kLanes != 0 || (sizeof(Stored) != sizeof(float) && n > kDirectRows))
      take_tile(step, item, scratch, start, gather(shape, read.sequence, start, all, scratch, ahead));
    else
      take_tile(step, item, scratch, start, locate(shape, read.sequence, start, all, ahead));
  }
}

inline void divide(const float* result, float sum, int64_t head_dim, float* out) {
  for (int64_t d = 0; d < head_dim; ++d) out[d] = result[d] / sum;
}

int64_t partial_size(const SluiceShape& shape) { return shape.value_stride + kLanes; }

template <typename Stored>
void write_row(const SluiceShape& shape, Stored* memory, int64_t slot, const float* key, const float* value) {
  const int64_t block = slot / shape.block_size, offset = slot % shape.block_size;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    Stored* unit = memory + (block * shape.num_kv_heads + head) * unit_size(shape);
    Stored* values = unit + shape.head_dim * shape.block_size + offset * shape.value_stride;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      narrow(key[head * shape.head_dim + d], unit + d * shape.block_size + offset);
      narrow(value[head * shape.head_dim + d], values + d);
    }
  }
}

void scale_queries(const SluiceShape& shape, const SluiceItem& item, int64_t kv_head, const float* query,
                   int64_t query_stride, const Scratch& scratch) {
  const int64_t heads = heads_per_kv_head(shape), stride = round_up(shape.head_dim, kLanes);
  for (int64_t r = 0; r < item.num_rows * heads; ++r) {
    const float* from =
        query + (item.first_row + r / heads) * query_stride + (kv_head * heads + r % heads) * shape.head_dim;
    for (int64_t d = 0; d < shape.head_dim; ++d) scratch.query[r * stride + d] = from[d] * shape.scale;
  }
}

struct Rows {
  const float* at;
  int64_t stride;
};

// One item and one KV head: rows of a sequence against their partitions.
template <typename Stored>
void run_item(const SluiceStep& step, const SluiceItem& item, int64_t kv_head, const Stored* memory, const Read<Stored>* next,
              const Scratch& scratch, Ahead* ahead, float* partials, float* out) {
  const SluiceShape& shape = step.shape;
  const int64_t heads = heads_per_kv_head(shape), n = item.num_rows * heads, width = shape.value_stride;
  const Read<Stored> read = read_of(step, item, memory, kv_head);
  if (item.partial >= 0) {
    take_partition(step, item, read, next, scratch, item.first_partition, ahead);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t place = (item.partial + r / heads) * shape.num_heads + kv_head * heads + r % heads;
      float* partial = partials + place * partial_size(shape);
      std::memcpy(partial, scratch.result + r * width, width * sizeof(float));
      partial[width] = scratch.max[r];
      partial[width + 1] = scratch.sum[r];
    }
    return;
  }
  reset(scratch.total, scratch.total_max, scratch.total_sum, n, width);
  for (int64_t p = 0; p < item.num_partitions; ++p) {
    take_partition(step, item, read, next, scratch, item.first_partition + p, ahead);
    for (int64_t r = 0; r < n; ++r)
      join(scratch.total + r * width, scratch.total_max + r, scratch.total_sum + r, scratch.result + r * width,
           scratch.max[r], scratch.sum[r], width);
  }
  for (int64_t r = 0; r < n; ++r) {
    const int64_t place = (item.first_row + r / heads) * shape.num_heads + kv_head * heads + r % heads;
    divide(scratch.total + r * width, scratch.total_sum[r], shape.head_dim, out + place * shape.head_dim);
  }
}

// One head of a row whose partitions went to several threads.
void run_merge(const SluiceStep& step, const SluiceMerge& merge, int64_t row, int64_t head, const Scratch& scratch,
               const float* partials, float* out) {
  const SluiceShape& shape = step.shape;
  const int64_t width = shape.value_stride;
  reset(scratch.total, scratch.total_max, scratch.total_sum, 1, width);
  for (int64_t p = 0; p < merge.num_partials; ++p) {
    const int64_t place = (merge.partial + p * merge.num_rows + row) * shape.num_heads + head;
    const float* part = partials + place * partial_size(shape);
    join(scratch.total, scratch.total_max, scratch.total_sum, part, part[width], part[width + 1], width);
  }
  const int64_t place = (merge.first_row + row) * shape.num_heads + head;
  divide(scratch.total, scratch.total_sum[0], shape.head_dim, out + place * shape.head_dim);
}

template <typename Stored>
void attend(const SluiceStep& step, Stored* memory, const Rows& query, const Rows& key, const Rows& value, float* out) {
  const SluiceShape& shape = step.shape;
  const int64_t size = scratch_size(shape, step.max_item_rows), kv_heads = shape.num_kv_heads;
  float* partials = step.workspace + step.threads * size;
  const int64_t at_once = step.threads == 1 || step.num_items >= kWholeItems * step.threads ? kv_heads : 1;
#pragma omp parallel num_threads(static_cast<int>(step.threads)) if (step.threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step.num_rows; ++row)
      write_row(shape, memory, step.slots[row], key.at + row * key.stride, value.at + row * value.stride);
    const Scratch scratch = make_scratch(step.workspace + omp_get_thread_num() * size, shape, step.max_item_rows);
    Ahead ahead;
#pragma omp for schedule(dynamic, at_once)
    for (int64_t i = 0; i < step.num_items * kv_heads; ++i) {
      const SluiceItem& item = step.items[i / kv_heads];
      scale_queries(shape, item, i % kv_heads, query.at, query.stride, scratch);
      const bool goes_on = at_once > 1 && i % kv_heads + 1 < kv_heads;
      const Read<Stored> next = goes_on ? read_of(step, item, memory, i % kv_heads + 1) : Read<Stored>();
      run_item(step, item, i % kv_heads, memory, goes_on ? &next : nullptr, scratch, &ahead, partials, out);
      ahead.go_on(shape.block_size);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < step.num_merges * shape.num_heads; ++i) {
      const SluiceMerge& merge = step.merges[i / shape.num_heads];
      for (int64_t row = 0; row < merge.num_rows; ++row)
        run_merge(step, merge, row, i % shape.num_heads, scratch, partials, out);
    }
  }
}

}  // namespace

SLUICE_EXPORT int64_t sluice_partition_keys() { return kPartition; }

// fp32 numbers that the workspace of a step needs.
SLUICE_EXPORT int64_t sluice_workspace_size(const SluiceShape* shape, int64_t threads, int64_t max_item_rows, int64_t partial_rows) {
  return threads * scratch_size(*shape, max_item_rows) + partial_rows * shape->num_heads * partial_size(*shape);
}

// Stores the rows' keys and values in `memory` of one layer, then attends. Heads of a row lie behind each other; strides
// from row to row are in numbers; out is [num_rows, num_heads, head_dim].
SLUICE_EXPORT void sluice_attend(const SluiceStep* step, void* memory, const float* query, int64_t query_stride, const float* key,
                                 int64_t key_stride, const float* value, int64_t value_stride, float* out) {
  const Rows queries = {query, query_stride}, keys = {key, key_stride}, values = {value, value_stride};
  if (step->shape.stored_bytes == sizeof(Half))
    return attend(*step, static_cast<Half*>(memory), queries, keys, values, out);
  attend(*step, static_cast<float*>(memory), queries, keys, values, out);
}

// Copies blocks of every layer, pair after pair: pairs [num_pairs, 2] of (from, to), strides and sizes in bytes.
SLUICE_EXPORT void sluice_copy_blocks(const char* from, int64_t from_layer, char* to, int64_t to_layer, int64_t layers,
                                      int64_t block_bytes, const int64_t* pairs, int64_t num_pairs, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (threads > 1)
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t pair = 0; pair < num_pairs; ++pair)
      std::memmove(to + layer * to_layer + pairs[2 * pair + 1] * block_bytes,
                   from + layer * from_layer + pairs[2 * pair] * block_bytes, block_bytes);
}
