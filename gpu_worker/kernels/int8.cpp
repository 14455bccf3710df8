// Matrix products of rows rounded to 10 bits and int8 weights.
//
// Contract: a row is rounded by its own largest magnitude, its products with a column are summed as whole numbers, which is
// exact in any order, and the sum is scaled by one multiplication. So the bits of a row depend on nothing beside it, and the
// shape of the tiles is free.
//
// A pair of neighbouring inputs, as two 16-bit numbers, goes through one multiply-add: as fast as the 8-bit instruction
// would be, whose 16-bit sums overflow with full 8-bit weights, and with room for finer rows. There are two variants, for AVX2
// and for AVX-512 with VNNI.
//
// A product is one call, and one region of threads: what comes before it, rounding, the sums.
//
// Weights lie in panels of kColumns outputs: [panels][pairs of inputs][kColumns][2].

#include <omp.h>

#include <utility>

#include "calls.h"
#include "int8_avx512.h"
#include "int8_tile.h"
#include "rows.h"

using namespace sluice;

namespace {

constexpr int64_t kRowsAtOnce = 128;  // rows that stay in the second cache while the weights pass by
constexpr int64_t kPanelsAtOnce = 4;

using Multiply = void (*)(const Product& product, int64_t row, int64_t panel);

// By the number of rows, from 1.
template <typename Variant, int... R>
Multiply tile_of(int64_t num_rows, std::integer_sequence<int, R...>) {
  static constexpr Multiply kTiles[] = {Variant::template multiply<R + 1>...};
  return kTiles[num_rows - 1];
}

template <typename Variant>
Multiply tile_of(int64_t num_rows) {
  return tile_of<Variant>(num_rows, std::make_integer_sequence<int, Variant::kRows>());
}

// To be called by all threads of a region; each takes panels that lie together. A tile goes through a few panels at a time,
// so that neither its rows nor the weights come from beyond the second cache for every use.
template <typename Variant>
void multiply_all(const Product& product, const Tiles& tiles) {
  const int64_t panels = (product.outputs + kColumns - 1) / kColumns, at_once = kRowsAtOnce / Variant::kRows;
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t begin = thread * panels / threads, end = (thread + 1) * panels / threads;
  for (int64_t first = 0; first < tiles.count; first += at_once)
    for (int64_t group = begin; group < end; group += kPanelsAtOnce)
      for (int64_t tile = first; tile < tiles.count && tile < first + at_once; ++tile)
        for (int64_t panel = group; panel < end && panel < group + kPanelsAtOnce; ++panel)
          tile_of<Variant>(tiles.size(tile))(product, tiles.begin(tile), panel);
}

// Where things lie in the workspace: scales of the rows, a row for each thread, and whole numbers from a line's begin on.
struct Workspace {
  float *row_scales, *scratch;
  int16_t* rows;
  int64_t size;

  Workspace(char* at, const SluiceInt8& weight, int64_t num_rows, int64_t threads) {
    const int64_t numbers = (num_rows + threads * weight.inputs) * sizeof(float);
    const int64_t begin = numbers + (-(reinterpret_cast<intptr_t>(at) + numbers) & 63);
    row_scales = reinterpret_cast<float*>(at);
    scratch = row_scales + num_rows;
    rows = reinterpret_cast<int16_t*>(at + begin);
    size = numbers + 63 + num_rows * padded(weight.inputs) * sizeof(int16_t);
  }
};

// Rounds what `prepare(row, scratch)` gives for each row, and multiplies.
template <typename Variant, typename Prepare>
void round_and_multiply(const SluiceInt8& weight, int64_t num_rows, const Workspace& workspace, float* out, int64_t threads,
                        const Prepare& prepare) {
  const int64_t row_size = padded(weight.inputs);
  const Product product = {workspace.rows, workspace.row_scales, weight.weights,          weight.scales, weight.bias,
                           out,            row_size,             (weight.inputs + 1) / 2, weight.outputs};
  const Tiles tiles(num_rows, Variant::kRows);
  const bool worth = num_rows * weight.outputs * weight.inputs >= kWorthThreads;
#pragma omp parallel num_threads(static_cast<int>(threads)) if (worth && threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const float* prepared = prepare(row, workspace.scratch + omp_get_thread_num() * weight.inputs);
      const int64_t tile = tiles.holding(row), first = tiles.begin(tile);
      int16_t* rounded = workspace.rows + first * row_size + (row - first) * kPiece;
      workspace.row_scales[row] = round_row(prepared, weight.inputs, rounded, tiles.size(tile) * kPiece);
    }
    multiply_all<Variant>(product, tiles);
  }
}

template <typename Prepare>
void round_and_multiply(const SluiceInt8& weight, int64_t num_rows, char* memory, float* out, int64_t threads,
                        const Prepare& prepare) {
  if (num_rows == 0) return;
  const Workspace workspace(memory, weight, num_rows, threads);
  if (uses_avx512()) return round_and_multiply<Avx512>(weight, num_rows, workspace, out, threads, prepare);
  round_and_multiply<Avx2>(weight, num_rows, workspace, out, threads, prepare);
}

}  // namespace

// Bytes of the workspace of a product.
SLUICE_EXPORT int64_t sluice_int8_workspace_size(const SluiceInt8* weight, int64_t num_rows, int64_t threads) {
  return Workspace(nullptr, *weight, num_rows, threads).size;
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
