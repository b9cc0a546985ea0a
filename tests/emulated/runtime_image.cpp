// Finds the PTX in what nvcc embeds into an object: a wrapper, which points to a fat binary, which
// is a header and entries, each a header and a payload.
#include <cstring>

#include "runtime.h"

namespace winnow::emulated {

namespace {

struct Wrapper {
  static constexpr uint32_t kMagic = 0x466243b1;
  uint32_t magic, version;
  const std::byte* fat_binary;
  const void* more;
};
struct FatHeader {
  static constexpr uint32_t kMagic = 0xba55ed50;
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // behind the header
};
struct Entry {
  static constexpr uint16_t kPtx = 1;
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;  // behind the header
};

template <class T>
T read(const std::byte* from) {
  T result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// PTX is text that begins with its version; compressed, it is not.
std::string_view text_of(const std::byte* begin, size_t bytes) {
  std::string_view text(reinterpret_cast<const char*>(begin), bytes);
  if (const size_t end = text.find('\0'); end != text.npos) text = text.substr(0, end);
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos || !(text[first] == '.' || text[first] == '/'))
    throw Fault("the PTX is compressed: compile with nvcc --no-compress");
  return text;
}

std::string_view find_ptx(const void* wrapper_address) {
  const auto wrapper = read<Wrapper>(static_cast<const std::byte*>(wrapper_address));
  if (wrapper.magic != Wrapper::kMagic)
    throw Fault("the fat binary's wrapper is of a kind that is not known");
  const auto header = read<FatHeader>(wrapper.fat_binary);
  if (header.magic != FatHeader::kMagic)
    throw Fault("the fat binary is of a kind that is not known");
  const std::byte* at = wrapper.fat_binary + header.header_bytes;
  const std::byte* const end = at + header.bytes;
  while (static_cast<size_t>(end - at) >= sizeof(Entry)) {
    const auto entry = read<Entry>(at);
    const auto left = static_cast<size_t>(end - at);
    if (entry.header_bytes < sizeof(Entry) || entry.header_bytes > left ||
        entry.bytes > left - entry.header_bytes)
      throw Fault("an entry of the fat binary is longer than the fat binary");
    if (entry.kind == Entry::kPtx) return text_of(at + entry.header_bytes, entry.bytes);
    at += entry.header_bytes + entry.bytes;
  }
  throw Fault(
      "the fat binary has no PTX: compile with nvcc -gencode "
      "arch=compute_90a,code=compute_90a");
}

}  // namespace

Module& Image::module() {
  if (!module_) module_ = load_module(find_ptx(wrapper_));
  return *module_;
}

}  // namespace winnow::emulated
