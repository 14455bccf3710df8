// Matrix products of fp32 rows and weights.
//
// Contract: that of the tiles. Inputs are taken in blocks of whole chains, between which the sums wait in the output; panels,
// rows and blocks are cut to what stays in a cache, and threads share out panels: none of it is seen in the bits.
//
// A product is one call, and one region of threads: what comes before it, the sums.
//
// Weights lie in panels of kColumns outputs: [panels][inputs][kColumns].

#include <omp.h>

#include <array>
#include <utility>

#include "calls.h"
#include "fp32_tiles.h"
#include "rows.h"

using namespace sluice;

namespace {

constexpr int64_t kInputsAtOnce = 16 * kChain;  // of the panels of a tile, which then stay in the second cache
constexpr int64_t kRowsAtOnce = 168;            // that stay there, or near it, while the weights pass by
constexpr int kMaxPanels = 4;  // more would be more streams of memory than go well beside each other
constexpr int64_t kLineBytes = 64;

// Tiles whose sums, weights and one number of a row fit the registers; with one row, weights need none.
constexpr bool fits_avx2(int rows, int panels) { return rows == 1 ? panels <= 4 : (rows + 1) * 2 * panels < 16; }
constexpr bool fits_avx512(int rows, int panels) { return (rows + 1) * panels < 32; }

template <int R, int P>
constexpr Multiply tile_avx2() {
  if constexpr (fits_avx2(R, P)) return multiply_avx2<R, P>;
  return nullptr;
}

template <int R, int P>
constexpr Multiply tile_avx512() {
  if constexpr (fits_avx512(R, P)) return multiply_avx512<R, P>;
  return nullptr;
}

using PanelTiles = std::array<Multiply, kMaxPanels>;

template <int R, size_t... P>
constexpr PanelTiles tiles_avx2(std::index_sequence<P...>) {
  return {tile_avx2<R, P + 1>()...};
}

template <int R, size_t... P>
constexpr PanelTiles tiles_avx512(std::index_sequence<P...>) {
  return {tile_avx512<R, P + 1>()...};
}

template <size_t... R>
constexpr std::array<PanelTiles, sizeof...(R)> all_avx2(std::index_sequence<R...>) {
  return {tiles_avx2<R + 1>(std::make_index_sequence<kMaxPanels>())...};
}

template <size_t... R>
constexpr std::array<PanelTiles, sizeof...(R)> all_avx512(std::index_sequence<R...>) {
  return {tiles_avx512<R + 1>(std::make_index_sequence<kMaxPanels>())...};
}

// By rows and panels of a tile, each less one. Six rows are the most that keep AVX2's registers full, 14 AVX-512's.
constexpr auto kAvx2 = all_avx2(std::make_index_sequence<6>());
constexpr auto kAvx512 = all_avx512(std::make_index_sequence<14>());

int64_t parts_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

Range part_of(int64_t size, int64_t parts, int64_t part) { return {part * size / parts, (part + 1) * size / parts}; }

struct Product {
  const float* rows;
  int64_t stride, num_rows;
  const SluiceFp32& weight;
  float* out;
};

// How a product is cut: chunks of rows times groups of panels are tasks, and a task is num_tiles tiles for each block of inputs.
struct Cut {
  const PanelTiles* by_rows;
  int64_t chunks, num_tiles, panels, groups;
};

Cut cut_up(const Product& product, int64_t threads) {
  const bool is_wide = uses_avx512();
  const PanelTiles* by_rows = is_wide ? kAvx512.data() : kAvx2.data();
  const int64_t max_rows = is_wide ? kAvx512.size() : kAvx2.size();
  const int64_t chunks = parts_of(product.num_rows, kRowsAtOnce), largest = parts_of(product.num_rows, chunks);
  const int64_t num_tiles = parts_of(largest, max_rows), panels = parts_of(product.weight.outputs, kColumns);
  const PanelTiles& tallest = by_rows[parts_of(largest, num_tiles) - 1];
  int64_t at_most = kMaxPanels;
  while (!tallest[at_most - 1]) --at_most;
  const int64_t even = parts_of(parts_of(panels, at_most), threads) * threads;  // as many groups for each thread
  return {by_rows, chunks, num_tiles, panels, even < panels ? even : panels};
}

// While a task's weights, which stay for all its tiles, are multiplied with, its tiles fetch those of the next task: memory has
// to give them at one even pace.
void multiply_task(const Product& product, const Cut& cut, int64_t task, bool is_last) {
  const SluiceFp32& weight = product.weight;
  const Range rows = part_of(product.num_rows, cut.chunks, task / cut.groups);
  const Range panels = part_of(cut.panels, cut.groups, task % cut.groups);
  const Range next = is_last ? panels : part_of(cut.panels, cut.groups, (task + 1) % cut.groups);
  const int64_t column = panels.begin * kColumns, next_step = is_last ? 0 : kLineBytes / cut.num_tiles;
  for (int64_t first = 0; first < weight.inputs; first += kInputsAtOnce) {
    const int64_t count = weight.inputs - first < kInputsAtOnce ? weight.inputs - first : kInputsAtOnce;
    const char* fetched = reinterpret_cast<const char*>(weight.weights + (next.begin * weight.inputs + first) * kColumns);
    for (int64_t index = 0; index < cut.num_tiles; ++index) {
      const Range part = part_of(rows.size(), cut.num_tiles, index);
      const int64_t row = rows.begin + part.begin;
      cut.by_rows[part.size() - 1][panels.size() - 1]({
          product.rows + row * product.stride + first,
          product.stride,
          weight.weights + (panels.begin * weight.inputs + first) * kColumns,
          weight.inputs * kColumns,
          count,
          product.out + row * weight.outputs + column,
          weight.outputs,
          weight.outputs - column,
          weight.bias && first + count == weight.inputs ? weight.bias + column : nullptr,
          first == 0,
          fetched + index * count * next_step,
          next_step,
      });
    }
  }
}

// Within a region of threads.
void multiply_all(const Product& product) {
  if (product.num_rows == 0) return;
  const int64_t threads = omp_get_num_threads();
  const Cut cut = cut_up(product, threads);
  const Range mine = part_of(cut.chunks * cut.groups, threads, omp_get_thread_num());
  for (int64_t task = mine.begin; task < mine.end; ++task) multiply_task(product, cut, task, task + 1 == mine.end);
}

// Of prepared rows: whole lines, and one more, lest the rows of a tile compete for the same places of a cache.
int64_t row_size(int64_t inputs) { return (parts_of(inputs, kColumns) + 1) * kColumns; }

bool is_worth_threads(const SluiceFp32& weight, int64_t num_rows) {
  return num_rows * weight.outputs * weight.inputs >= kWorthThreads;
}

// Multiplies what `prepare(row, out)` writes for each row. The workspace holds the prepared rows.
template <typename Prepare>
void prepare_and_multiply(const SluiceFp32& weight, int64_t num_rows, char* workspace, float* out, int64_t threads,
                          Prepare prepare) {
  float* rows = reinterpret_cast<float*>(workspace);
  const int64_t size = row_size(weight.inputs);
  const Product product = {rows, size, num_rows, weight, out};
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1 && is_worth_threads(weight, num_rows))
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) prepare(row, rows + row * size);
    multiply_all(product);
  }
}

}  // namespace

// Bytes of the workspace of a product.
SLUICE_EXPORT int64_t sluice_fp32_workspace_size(const SluiceFp32* weight, int64_t num_rows, int64_t) {
  return num_rows * row_size(weight->inputs) * sizeof(float);
}

// out [num_rows, outputs] = rows x weight. Needs no workspace.
SLUICE_EXPORT void sluice_fp32_rows(const SluiceFp32* weight, const float* rows, int64_t stride, int64_t num_rows, char*,
                                    float* out, int64_t threads) {
  const Product product = {rows, stride, num_rows, *weight, out};
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1 && is_worth_threads(*weight, num_rows))
  multiply_all(product);
}

// hidden [num_rows, inputs] += delta, if there is one; out = its normalised rows x weight.
SLUICE_EXPORT void sluice_fp32_after_norm(const SluiceFp32* weight, float* hidden, const float* delta, const float* norm,
                                          float eps, int64_t num_rows, char* workspace, float* out, int64_t threads) {
  const int64_t width = weight->inputs;
  prepare_and_multiply(*weight, num_rows, workspace, out, threads, [=](int64_t row, float* prepared) {
    if (delta) add_row(hidden + row * width, delta + row * width, width);
    normalise(hidden + row * width, norm, eps, width, prepared);
  });
}

// out = silu(gate) * up x weight, of gate_up [num_rows, 2 * inputs].
SLUICE_EXPORT void sluice_fp32_after_gate(const SluiceFp32* weight, const float* gate_up, int64_t stride, int64_t num_rows,
                                          char* workspace, float* out, int64_t threads) {
  const int64_t width = weight->inputs;
  prepare_and_multiply(*weight, num_rows, workspace, out, threads, [=](int64_t row, float* prepared) {
    const float* gate = gate_up + row * stride;
    gate_row(gate, gate + width, 0, width, prepared);
  });
}
