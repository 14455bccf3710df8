// The operations that other files of the library call too; each is described where it stands.
#pragma once

#include "attention_memory.h"

namespace sluice {

extern "C" {

// A weight in panels; scales and bias (or none) have a number for each column of all panels.
struct SluiceInt8 {
  const int8_t* weights;
  const float *scales, *bias;
  int64_t inputs, outputs;
};

// A weight in panels, at the start of a line of the cache; bias (or none) has a number for each column of all panels.
struct SluiceFp32 {
  const float *weights, *bias;
  int64_t inputs, outputs;
};

}  // extern "C"

}  // namespace sluice

SLUICE_EXPORT void sluice_rms_norm(const float* in, int64_t in_row, int64_t in_part, float* out, int64_t out_row, int64_t out_part,
                                   const float* weight, float eps, int64_t rows, int64_t parts, int64_t width, int64_t threads);
SLUICE_EXPORT void sluice_rotate(float* heads, int64_t row_stride, int64_t head_stride, const float* turns, int64_t rows,
                                 int64_t num_heads, int64_t half, int64_t threads);
SLUICE_EXPORT void sluice_attend(const sluice::SluiceStep* step, void* memory, const float* query, int64_t query_stride,
                                 const float* key, int64_t key_stride, const float* value, int64_t value_stride, float* out);
SLUICE_EXPORT void sluice_int8_rows(const sluice::SluiceInt8* weight, const float* rows, int64_t stride, int64_t num_rows,
                                    char* workspace, float* out, int64_t threads);
SLUICE_EXPORT void sluice_int8_after_norm(const sluice::SluiceInt8* weight, float* hidden, const float* delta, const float* norm,
                                          float eps, int64_t num_rows, char* workspace, float* out, int64_t threads);
SLUICE_EXPORT void sluice_int8_after_gate(const sluice::SluiceInt8* weight, const float* gate_up, int64_t stride,
                                          int64_t num_rows, char* workspace, float* out, int64_t threads);
SLUICE_EXPORT void sluice_fp32_rows(const sluice::SluiceFp32* weight, const float* rows, int64_t stride, int64_t num_rows,
                                    char* workspace, float* out, int64_t threads);
SLUICE_EXPORT void sluice_fp32_after_norm(const sluice::SluiceFp32* weight, float* hidden, const float* delta, const float* norm,
                                          float eps, int64_t num_rows, char* workspace, float* out, int64_t threads);
SLUICE_EXPORT void sluice_fp32_after_gate(const sluice::SluiceFp32* weight, const float* gate_up, int64_t stride,
                                          int64_t num_rows, char* workspace, float* out, int64_t threads);
