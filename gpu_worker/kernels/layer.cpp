// A decoder layer as one call: the operations of the other files, one after the other. What it saves is the
// caller's time between them, which with few rows is a third of a step.

#include "calls.h"

using namespace sluice;

namespace {

extern "C" {

struct SluiceLayer {
  const void *query_key_value, *attention_output, *gate_up, *down;  // all of the kind that the call names
  const float *input_norm, *mlp_norm;
  const float *query_norm, *key_norm;  // of single heads; none
  int64_t num_heads, num_kv_heads, head_dim, is_rotary;
  float eps;
};

// The rows of a step, and memory for what is between two operations.
struct SluiceRows {
  float *hidden, *delta;  // [num_rows, width]; delta is still to be added to hidden
  const float* turns;     // [num_rows, 2, head_dim / 2]
  float *fused, *attended, *gate_up;
  char* workspace;
  int64_t num_rows, threads;
};

}  // extern "C"

struct Int8 {
  using Weight = SluiceInt8;
  static constexpr auto kRows = sluice_int8_rows;
  static constexpr auto kAfterNorm = sluice_int8_after_norm;
  static constexpr auto kAfterGate = sluice_int8_after_gate;
};

struct Fp32 {
  using Weight = SluiceFp32;
  static constexpr auto kRows = sluice_fp32_rows;
  static constexpr auto kAfterNorm = sluice_fp32_after_norm;
  static constexpr auto kAfterGate = sluice_fp32_after_gate;
};

// Takes delta in, unless this is the first layer, and leaves its own.
template <typename Kind>
void run_layer(const SluiceLayer* layer, const SluiceStep* step, void* memory, const SluiceRows* rows, bool is_first) {
  using Weight = typename Kind::Weight;
  const auto* query_key_value = static_cast<const Weight*>(layer->query_key_value);
  const auto* attention_output = static_cast<const Weight*>(layer->attention_output);
  const auto* gate_up = static_cast<const Weight*>(layer->gate_up);
  const auto* down = static_cast<const Weight*>(layer->down);
  const int64_t n = rows->num_rows, threads = rows->threads, size = layer->head_dim;
  const int64_t keys = layer->num_heads * size, values = keys + layer->num_kv_heads * size;
  const int64_t stride = values + layer->num_kv_heads * size;
  float* fused = rows->fused;
  Kind::kAfterNorm(query_key_value, rows->hidden, is_first ? nullptr : rows->delta, layer->input_norm, layer->eps, n,
                   rows->workspace, fused, threads);
  if (layer->query_norm && layer->key_norm) {
    sluice_rms_norm(fused, stride, size, fused, stride, size, layer->query_norm, layer->eps, n, layer->num_heads, size, threads);
    sluice_rms_norm(fused + keys, stride, size, fused + keys, stride, size, layer->key_norm, layer->eps, n, layer->num_kv_heads,
                    size, threads);
  }
  if (layer->is_rotary)
    sluice_rotate(fused, stride, size, rows->turns, n, layer->num_heads + layer->num_kv_heads, size / 2, threads);
  sluice_attend(step, memory, fused, stride, fused + keys, stride, fused + values, stride, rows->attended);
  Kind::kRows(attention_output, rows->attended, keys, n, rows->workspace, rows->delta, threads);
  Kind::kAfterNorm(gate_up, rows->hidden, rows->delta, layer->mlp_norm, layer->eps, n, rows->workspace, rows->gate_up, threads);
  Kind::kAfterGate(down, rows->gate_up, gate_up->outputs, n, rows->workspace, rows->delta, threads);
}

}  // namespace

SLUICE_EXPORT void sluice_int8_layer(const SluiceLayer* layer, const SluiceStep* step, void* memory, const SluiceRows* rows,
                                     int64_t is_first) {
  run_layer<Int8>(layer, step, memory, rows, is_first != 0);
}

SLUICE_EXPORT void sluice_fp32_layer(const SluiceLayer* layer, const SluiceStep* step, void* memory, const SluiceRows* rows,
                                     int64_t is_first) {
  run_layer<Fp32>(layer, step, memory, rows, is_first != 0);
}
