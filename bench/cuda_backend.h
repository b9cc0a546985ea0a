// Timing on a CUDA device, and what its benchmarks need of the runtime. CUDA builds only.
#pragma once

#include <cstddef>

namespace winnow::bench {

void* cuda_stream();  // the one that runs are queued on
void* cuda_allocate(size_t bytes);
void cuda_release(void* memory);
void cuda_wait();  // for the stream
void cuda_upload(void* to, const void* from, size_t bytes);

// Queues a kernel after which the instruction caches hold nothing of those before it.
void cuda_run_other_code(void* stream);

// Queues a kernel that copies `bytes`, which 16 divides: 16 B a load, four a thread, no loop.
void cuda_copy(void* to, const void* from, size_t bytes, void* stream);

// FLOP/s of the tensor cores on bf16 operands.
double cuda_tensor_roof(void* stream);

}  // namespace winnow::bench
