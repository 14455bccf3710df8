#include "isa.h"

#include <atomic>

#include "simd.h"

namespace sluice {

bool has_avx512() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  }();
  return has;
}

namespace {

std::atomic<bool> is_used{has_avx512()};

}  // namespace

bool uses_avx512() { return is_used.load(std::memory_order_relaxed); }

}  // namespace sluice

// For tests, which compare the variants: 0 forces AVX2, 1 takes AVX-512 where there is any. Returns which is used from now on.
SLUICE_EXPORT int sluice_use_avx512(int wanted) {
  sluice::is_used.store(wanted != 0 && sluice::has_avx512(), std::memory_order_relaxed);
  return sluice::uses_avx512();
}

// Whether AVX-512 is used.
SLUICE_EXPORT int sluice_uses_avx512() { return sluice::uses_avx512(); }
