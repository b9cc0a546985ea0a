// WINNOW_HD marks small functions that host code and CUDA kernels share; WINNOW_HD_INLINE those
// that a kernel without a register to spare takes.
#pragma once

#ifdef __CUDACC__
#define WINNOW_HD __host__ __device__
#define WINNOW_HD_INLINE __host__ __device__ __forceinline__
#else
#define WINNOW_HD
#define WINNOW_HD_INLINE inline
#endif
