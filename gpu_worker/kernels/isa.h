// Which instructions the kernels use. The library is compiled for AVX2; what is faster with AVX-512 has a second variant,
// whose functions carry SLUICE_AVX512 and whose results have the same bits. A lambda inherits no target: variants are written
// without them.
#pragma once

#define SLUICE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

namespace sluice {

// Whether this CPU and the operating system have what SLUICE_AVX512 names.
bool has_avx512();

// Whether the kernels use it: where they can, unless a test has chosen otherwise.
bool uses_avx512();

}  // namespace sluice
