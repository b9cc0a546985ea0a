// safetensors files: the golden vectors of the tests, and what the tools read and write.
//
// A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes.
// Everything in it is checked before a view is given out, so a damaged file is an Error and nothing
// else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::tools {

// The tensors of one file, in memory of its own. Views stay valid while the object (or one it was
// moved into) lives. Every tensor starts at a multiple of 64 bytes, whatever its place in the file.
class Safetensors {
 public:
  // Throws Error: kRuntime when the file cannot be read, kInvalidArgument when it is malformed
  // (truncated, bad JSON, duplicate names, sizes that do not match, overlaps, holes) and
  // kUnsupported for a dtype that winnow has no use for or more than four dimensions.
  static Safetensors read(const std::string& path);
  // Only the tensors whose names `wanted` takes: of the others neither bytes, dtype nor shape are
  // looked at, so that a shard of a checkpoint may hold what winnow has no use for.
  static Safetensors read(const std::string& path,
                          const std::function<bool(const std::string&)>& wanted);
  // The same from memory; `name` stands for the path in messages.
  static Safetensors parse(std::span<const std::byte> file, const std::string& name);

  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  // The tensor of this name; throws Error listing the names there are. A scalar has shape [1].
  const Tensor& at(const std::string& name) const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // A metadata entry as a number; throws Error when it is missing or not a finite number.
  double number(const std::string& key) const;

 private:
  // Where a file's bytes come from: the range that begins there goes to memory.
  using Source = std::function<void(uint64_t begin, std::span<std::byte> to)>;
  using Wanted = std::function<bool(const std::string&)>;
  static Safetensors load(const std::string& path, uint64_t file_bytes, const Source& source,
                          const Wanted& wanted);

  struct Free {
    void operator()(std::byte* p) const;
  };
  std::string path_;
  std::unique_ptr<std::byte, Free> memory_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The file as bytes; strided tensors are stored contiguously. Names must differ.
std::vector<std::byte> encode_safetensors(
    const std::vector<std::pair<std::string, Tensor>>& tensors,
    const std::map<std::string, std::string>& metadata = {});
void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace winnow::tools
