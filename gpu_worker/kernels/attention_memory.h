// What a step of attention is told, what a thread works in, and where a tile of keys lies. The contract stands in
// attention.cpp.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

#ifndef SLUICE_TILE_KEYS
#define SLUICE_TILE_KEYS 64
#endif

namespace sluice {

constexpr int64_t kTile = SLUICE_TILE_KEYS;
constexpr int64_t kTileVectors = kTile / kLanes;
constexpr int64_t kPartition = 1024;  // keys that one thread takes of a long context
constexpr int64_t kGroup = 3;         // rows that share the registers of one pass over a tile
constexpr float kNothing = -std::numeric_limits<float>::infinity();

extern "C" {

struct SluiceShape {
  int64_t num_heads, num_kv_heads, head_dim, value_stride, block_size;
  float scale;  // of query times key: times log2(e), or, with a softcap, divided by it
  float softcap;  // bound of the scores, times log2(e); 0: none
  int32_t stored_bytes;  // of a number in KV memory: 4 for fp32, 2 for fp16
};

// Rows of one sequence at positions from first_position on, and the partitions of keys to go through.
struct SluiceItem {
  int64_t table_start, first_row, num_rows, first_position, first_partition, num_partitions;
  int64_t partial;  // the first of num_rows partial results in the workspace; -1: the result goes to the output
};

struct SluiceMerge {
  int64_t first_row, num_rows, partial, num_partials;
};

struct SluiceStep {
  SluiceShape shape;
  int64_t threads, num_rows, num_items, num_merges, window, max_item_rows;
  const int64_t* slots;     // [num_rows]: block * block_size + offset
  const int32_t* tables;    // block tables of all sequences
  const SluiceItem* items;  // most expensive first
  const SluiceMerge* merges;
  float* workspace;  // sluice_workspace_size() numbers
};

}  // extern "C"

// What a thread works in. Rows are (row, head of the KV head), n = rows * heads per KV head of them.
struct Scratch {
  float *query, *scores, *result, *total;     // [n, head_dim], [n, kTile], [n, value_stride] twice
  float *max, *sum, *total_max, *total_sum, *correction;  // [n]
  float *keys, *values;                       // a gathered tile, for block sizes that are no whole vectors
};

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

inline int64_t heads_per_kv_head(const SluiceShape& shape) { return shape.num_heads / shape.num_kv_heads; }

inline int64_t scratch_size(const SluiceShape& shape, int64_t item_rows) {
  const int64_t n = round_up(item_rows * heads_per_kv_head(shape), kLanes);
  const int64_t rows = n * (round_up(shape.head_dim, kLanes) + kTile + 2 * shape.value_stride + 5);
  return round_up(rows + kTile * (shape.head_dim + shape.value_stride), 16);
}

inline Scratch make_scratch(float* at, const SluiceShape& shape, int64_t item_rows) {
  const int64_t n = round_up(item_rows * heads_per_kv_head(shape), kLanes);
  const auto take = [&at](int64_t size) { return at += size, at - size; };
  Scratch scratch;
  scratch.keys = take(kTile * shape.head_dim);
  scratch.values = take(kTile * shape.value_stride);
  scratch.scores = take(n * kTile);
  scratch.result = take(n * shape.value_stride);
  scratch.total = take(n * shape.value_stride);
  scratch.query = take(n * round_up(shape.head_dim, kLanes));
  scratch.max = take(n);
  scratch.sum = take(n);
  scratch.total_max = take(n);
  scratch.total_sum = take(n);
  scratch.correction = take(n);
  return scratch;
}

struct Range {
  int64_t begin, end;
};

// Keys of the tile at `start` that the row at `position` sees.
inline Range visible(int64_t position, int64_t start, int64_t window) {
  const int64_t first = window > 0 ? position - window + 1 - start : 0;
  const int64_t end = position + 1 - start;
  return {first > 0 ? first : 0, end < kTile ? end : kTile};
}

struct Half {
  uint16_t bits;
};

inline Vector load(const float* at) { return _mm256_loadu_ps(at); }
inline Vector load(const Half* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
inline float widen(float x) { return x; }
inline float widen(Half x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Half* to) { to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Brings the blocks that come next into the second cache, a few lines with each step of the loops over a tile: a block is too
// short for the processor to notice by itself that it is read from end to end. What comes next are the rest of what is read
// now and the beginning of what is read then.
struct Ahead {
  static constexpr int64_t kLine = 64;

  const char* blocks[kTile];
  int64_t count = 0, num_now = 0;  // blocks, and how many of them are read now; the others then
  int64_t next = 0, bytes = 0, offset = 0;
  int64_t reached_now = 0, reached_then = 0;  // keys up to which blocks have come

  // Where the next `lines` lines begin, all in one block or a little behind it; what lies at `otherwise` when there are no more.
  const char* take(int64_t lines, const void* otherwise) {
    if (next == count) return static_cast<const char*>(otherwise);
    const char* at = blocks[next] + offset;
    offset += lines * kLine;
    if (offset >= bytes) offset = 0, ++next;
    return at;
  }

  // Forgets the blocks, and remembers how far it came with them.
  void settle(int64_t block_size) {
    const int64_t now = next < num_now ? next : num_now;
    reached_now += now * block_size;
    reached_then += (next - now) * block_size;
    count = num_now = next = offset = 0;
  }

  // What was read then is read now.
  void go_on(int64_t block_size) {
    settle(block_size);
    reached_now = reached_then;
    reached_then = 0;
  }
};

// Lines with each step, so that a tile brings one like itself in: more at once only get in each other's way.
template <typename Stored>
constexpr int64_t kAheadLines = sizeof(Stored) / 2;

template <typename Stored>
inline void fetch(const char* at) {
  for (int64_t line = 0; line < kAheadLines<Stored>; ++line) _mm_prefetch(at + line * Ahead::kLine, _MM_HINT_T1);
}

// Where the keys and values of a tile's vectors lie: element d of the keys of vector j at keys[j] + d * key_stride, the
// values of its key i at values[j] + i * value_stride.
template <typename Stored>
struct Tile {
  const Stored *keys[kTileVectors], *values[kTileVectors];
  int64_t key_stride;
  Ahead* ahead;
};

template <typename Stored>
struct Sequence {
  const Stored* memory;  // of the layer, moved to the KV head
  int64_t block_stride;
  const int32_t* table;
};

// Adds blocks from key `reached` on, but not from before `begin`, up to `end` and to a tile's worth of blocks in all.
template <typename Stored>
inline void expect(const SluiceShape& shape, const Sequence<Stored>& sequence, int64_t begin, int64_t end, int64_t* reached,
                   Ahead* ahead) {
  const int64_t size = shape.block_size, most = kTile > size ? kTile / size : 1;
  int64_t block = (*reached > begin ? *reached : begin) / size;
  for (*reached = block * size; block * size < end && ahead->count < most; ++block)
    ahead->blocks[ahead->count++] =
        reinterpret_cast<const char*>(sequence.memory + sequence.table[block] * sequence.block_stride);
}

// Locates vectors [begin, end) of the tile at `start`, none of which lies in several blocks.
template <typename Stored>
inline Tile<Stored> locate(const SluiceShape& shape, const Sequence<Stored>& sequence, int64_t start, Range keys, Ahead* ahead) {
  Tile<Stored> tile;
  tile.ahead = ahead;
  tile.key_stride = shape.block_size;
  for (int64_t j = keys.begin / kLanes; j * kLanes < keys.end; ++j) {
    const int64_t key = start + j * kLanes, offset = key % shape.block_size;
    const Stored* block = sequence.memory + sequence.table[key / shape.block_size] * sequence.block_stride;
    tile.keys[j] = block + offset;
    tile.values[j] = block + shape.head_dim * shape.block_size + offset * shape.value_stride;
  }
  return tile;
}

// The tile as fp32 in the scratch: for block sizes that are no whole vectors, and for fp16 that many rows will read.
template <typename Stored>
inline Tile<float> gather(const SluiceShape& shape, const Sequence<Stored>& sequence, int64_t start, Range keys,
                          const Scratch& scratch, Ahead* ahead) {
  Tile<float> tile;
  tile.ahead = ahead;
  tile.key_stride = kTile;
  for (int64_t j = 0; j < kTileVectors; ++j) {
    tile.keys[j] = scratch.keys + j * kLanes;
    tile.values[j] = scratch.values + j * kLanes * shape.value_stride;
  }
  const bool is_whole = shape.block_size % kLanes == 0;
  for (int64_t i = keys.begin / kLanes * kLanes; i < keys.end; i += is_whole ? kLanes : 1) {
    const int64_t key = start + i, offset = key % shape.block_size;
    const Stored* block = sequence.memory + sequence.table[key / shape.block_size] * sequence.block_stride;
    const Stored* value = block + shape.head_dim * shape.block_size + offset * shape.value_stride;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const Stored* from = block + d * shape.block_size + offset;
      if (is_whole) _mm256_storeu_ps(scratch.keys + d * kTile + i, load(from));
      else scratch.keys[d * kTile + i] = widen(*from);
    }
    for (int64_t d = 0; d < (is_whole ? kLanes : 1) * shape.value_stride; d += kLanes)
      _mm256_storeu_ps(scratch.values + i * shape.value_stride + d, load(value + d));
  }
  return tile;
}

}  // namespace sluice
