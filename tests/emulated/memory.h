// The memory that kernels may touch: what the pretended device has given out. Addresses are the
// host's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace winnow::emulated {

// Adds [begin, begin + bytes), and takes it away again. remove() gives the bytes, or 0 where no
// memory begins there.
void add_memory(void* begin, size_t bytes);
size_t remove_memory(void* begin);
// Whether all bytes lie in one piece of it.
bool holds(uint64_t address, size_t bytes);

}  // namespace winnow::emulated
