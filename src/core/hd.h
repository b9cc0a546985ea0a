// WINNOW_HD marks small functions that host code and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define WINNOW_HD __host__ __device__
#else
#define WINNOW_HD
#endif
