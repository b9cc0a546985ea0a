// Which memory kernels may touch, and which they may not.
#include "memory.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace winnow::emulated {
namespace {

uint64_t address(const std::byte* p) { return reinterpret_cast<uint64_t>(p); }

TEST(EmulatedMemory, HoldsWhatWasAddedAndNoByteMore) {
  std::vector<std::byte> bytes(300);
  std::byte* const first = bytes.data() + 100;
  add_memory(first, 100);
  EXPECT_TRUE(holds(address(first), 100));
  EXPECT_TRUE(holds(address(first + 99), 1));
  EXPECT_FALSE(holds(address(first - 1), 1));
  EXPECT_FALSE(holds(address(first - 1), 2));
  EXPECT_FALSE(holds(address(first + 99), 2));
  EXPECT_FALSE(holds(address(first + 100), 1));
  EXPECT_FALSE(holds(address(first), SIZE_MAX)) << "an end that wraps";
  EXPECT_FALSE(holds(0, 1));
  EXPECT_EQ(remove_memory(first + 1), 0u);
  EXPECT_EQ(remove_memory(first), 100u);
  EXPECT_FALSE(holds(address(first), 1)) << "as this thread remembers it";
}

// Pieces that touch are not one piece, and an overlap is a mistake of the runtime.
TEST(EmulatedMemory, KeepsPiecesApart) {
  std::vector<std::byte> bytes(64);
  std::byte* const p = bytes.data();
  add_memory(p, 32);
  add_memory(p + 32, 32);
  EXPECT_FALSE(holds(address(p + 31), 2));
  EXPECT_THROW(add_memory(p + 16, 4), std::invalid_argument);
  EXPECT_THROW(add_memory(p, 64), std::invalid_argument);
  EXPECT_THROW(add_memory(p, 0), std::invalid_argument);
  EXPECT_EQ(remove_memory(p), 32u);
  EXPECT_THROW(add_memory(p + 16, 17), std::invalid_argument);
  EXPECT_EQ(remove_memory(p + 32), 32u);
}

// More pieces than a thread remembers, on several threads, one of which takes some away.
TEST(EmulatedMemory, ServesThreads) {
  constexpr size_t kPieces = 40, kBytes = 64;
  std::vector<std::byte> bytes(2 * kPieces * kBytes);
  const auto piece = [&](size_t i) { return bytes.data() + 2 * i * kBytes; };
  for (size_t i = 0; i < kPieces; ++i) add_memory(piece(i), kBytes);
  const auto look = [&](size_t first) {
    for (int round = 0; round < 1000; ++round)
      for (size_t i = first; i < kPieces; ++i) {
        EXPECT_TRUE(holds(address(piece(i)), kBytes));
        EXPECT_FALSE(holds(address(piece(i)) + kBytes, 1));
      }
  };
  std::thread one(look, kPieces / 2), two(look, kPieces / 2);
  for (size_t i = 0; i < kPieces / 2; ++i) {
    EXPECT_EQ(remove_memory(piece(i)), kBytes);
    EXPECT_FALSE(holds(address(piece(i)), 1));
  }
  one.join();
  two.join();
  for (size_t i = kPieces / 2; i < kPieces; ++i) EXPECT_EQ(remove_memory(piece(i)), kBytes);
}

}  // namespace
}  // namespace winnow::emulated
