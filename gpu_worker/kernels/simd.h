// Vectors of eight fp32 numbers, and the few functions whose order of operations is a contract.
//
// Compiled without contraction and without -ffast-math: what is written is what is computed, in every template instance,
// so that a row has the same bits whichever instance computes it. Fused multiply-adds are asked for by name.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define SLUICE_EXPORT extern "C" __attribute__((visibility("default")))

namespace sluice {

using Vector = __m256;
constexpr int64_t kLanes = 8;

// Lanes below `count` set; count 0..8. For the last, partial vector of a row: the same instructions as a full one.
inline __m256i first_lanes(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
}

inline float sum_lanes(Vector x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline float max_lanes(Vector x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

// 2^f for f in [-0.5, 0.5], relative error 2e-9 before rounding (Cephes' exp2f).
inline Vector exp2_fraction(Vector f) {
  Vector p = _mm256_set1_ps(1.535336188319500e-4f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.339887440266574e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.618437357674640e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.550332471162809e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.402264791363012e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.931472028550421e-1f));
  return _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
}

// 2^n for whole n in [-126, 127].
inline Vector exp2_whole(Vector n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

// 2^x for x <= 0; zero below the normal numbers, 1 at 0, NaN for NaN (max_ps gives its second operand then).
inline Vector exp2_of_negative(Vector x) {
  const Vector lowest = _mm256_set1_ps(-126.0f);
  const Vector clamped = _mm256_max_ps(lowest, x);
  const Vector n = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector power = _mm256_mul_ps(exp2_fraction(_mm256_sub_ps(clamped, n)), exp2_whole(n));
  return _mm256_and_ps(power, _mm256_cmp_ps(x, lowest, _CMP_NLT_UQ));
}

inline float exp2_of_negative(float x) { return _mm256_cvtss_f32(exp2_of_negative(_mm256_set1_ps(x))); }

// e^x within 2 units in the last place; x is clamped to where the result is a normal number.
inline Vector exp_of(Vector x) {
  const Vector clamped = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
  const Vector log2e = _mm256_set1_ps(1.44269504088896341f);
  const Vector n = _mm256_round_ps(_mm256_mul_ps(clamped, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vector rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clamped);  // ln 2 in two parts
  rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), rest);
  return _mm256_mul_ps(exp2_fraction(_mm256_mul_ps(rest, log2e)), exp2_whole(n));
}

// Near zero, where the quotient would lose its digits, Cephes' tanhf; NaN for NaN.
inline Vector tanh_of(Vector x) {
  const Vector sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  const Vector one = _mm256_set1_ps(1.0f), power = exp2_of_negative(_mm256_mul_ps(size, _mm256_set1_ps(-2.88539008177792681f)));
  const Vector large = _mm256_or_ps(_mm256_div_ps(_mm256_sub_ps(one, power), _mm256_add_ps(one, power)), sign);
  const Vector square = _mm256_mul_ps(x, x);
  Vector p = _mm256_set1_ps(-5.70498872745e-3f);
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.06390887954e-2f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-5.37397155531e-2f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(1.33314422036e-1f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-3.33332819422e-1f));
  const Vector small = _mm256_fmadd_ps(_mm256_mul_ps(p, square), x, x);
  return _mm256_blendv_ps(large, small, _mm256_cmp_ps(size, _mm256_set1_ps(0.625f), _CMP_LT_OQ));
}

}  // namespace sluice
