#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "device_memory.h"
#include "winnow/error.h"

namespace winnow::tools {

namespace {

using json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr size_t kAlign = 64;
constexpr int kMaxRank = 4;

struct TypeName {
  const char* name;
  DType dtype;
};
constexpr TypeName kTypes[] = {
    {"BF16", DType::kBf16}, {"F8_E4M3", DType::kE4m3}, {"F32", DType::kF32},   {"I32", DType::kI32},
    {"I64", DType::kI64},   {"U8", DType::kU8},        {"F8_E8M0", DType::kU8}};  // read as bytes

[[noreturn]] void fail(ErrorCode code, const std::string& path, const std::string& what) {
  throw Error(code, "safetensors: " + path + ": " + what);
}

// The JSON parser keeps the last of two equal names; they are refused while it reads. Nesting is
// bounded by the format itself (header, tensor, shape), so deeper input is refused as well.
json parse_header(const std::string& path, std::string_view text) {
  std::vector<std::set<std::string>> names;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 3) fail(ErrorCode::kInvalidArgument, path, "header: nested too deeply");
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key && !names.back().insert(parsed.get<std::string>()).second)
      fail(ErrorCode::kInvalidArgument, path,
           "header: the name '" + parsed.get<std::string>() + "' appears twice");
    return true;
  };
  try {
    json header = json::parse(text.begin(), text.end(), watch);
    if (!header.is_object()) fail(ErrorCode::kInvalidArgument, path, "header: not a JSON object");
    return header;
  } catch (const json::exception& e) {
    fail(ErrorCode::kInvalidArgument, path, std::string("header: ") + e.what());
  }
}

struct Entry {
  Tensor view;  // without data
  uint64_t begin = 0, end = 0;
};

uint64_t whole_number(const json& value, const std::string& path, const std::string& where) {
  if (!value.is_number_unsigned())
    fail(ErrorCode::kInvalidArgument, path,
         where + ": expected a whole number, found " + value.dump(-1, ' ', true).substr(0, 40));
  return value.get<uint64_t>();
}

void read_shape(const json& value, const std::string& path, const std::string& name, Entry& e) {
  const std::string where = "tensor '" + name + "': shape";
  if (!value.is_array()) fail(ErrorCode::kInvalidArgument, path, where + ": expected an array");
  if (value.size() > kMaxRank)
    fail(ErrorCode::kUnsupported, path,
         where + ": expected at most 4 dimensions, found " + std::to_string(value.size()));
  e.view.rank = std::max<int>(1, static_cast<int>(value.size()));
  e.view.shape[0] = 1;  // a scalar
  int i = 0;
  for (const json& n : value) {
    const uint64_t size = whole_number(n, path, where);
    if (size > INT64_MAX) fail(ErrorCode::kInvalidArgument, path, where + ": leaves 64 bits");
    e.view.shape[i++] = static_cast<int64_t>(size);
  }
  int64_t stride = 1, bytes = 0;
  for (i = e.view.rank - 1; i >= 0; --i) {
    e.view.stride[i] = stride;
    if (__builtin_mul_overflow(stride, e.view.shape[i], &stride))
      fail(ErrorCode::kInvalidArgument, path, where + ": leaves 64 bits");
  }
  if (__builtin_mul_overflow(stride, size_of(e.view.dtype), &bytes))
    fail(ErrorCode::kInvalidArgument, path, where + ": leaves 64 bits");
  if (e.end - e.begin != static_cast<uint64_t>(bytes))
    fail(ErrorCode::kInvalidArgument, path,
         where + ": takes " + std::to_string(bytes) + " bytes, but data_offsets hold " +
             std::to_string(e.end - e.begin));
}

// Of a tensor that is not wanted the range alone.
Entry read_entry(const std::string& path, const std::string& name, const json& value,
                 uint64_t data_bytes, bool wanted) {
  const std::string where = "tensor '" + name + "'";
  const bool whole = value.is_object() && value.size() == 3 && value.contains("dtype") &&
                     value.contains("shape") && value.contains("data_offsets");
  if (!whole)
    fail(ErrorCode::kInvalidArgument, path, where + ": expected dtype, shape and data_offsets");
  Entry e;
  if (wanted) {
    const json& type = value["dtype"];
    const auto known = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const TypeName& t) { return type == t.name; });
    if (known == std::end(kTypes))
      fail(type.is_string() ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument, path,
           where + ": dtype: expected BF16, F8_E4M3, F8_E8M0, F32, I32, I64 or U8, found " +
               type.dump(-1, ' ', true).substr(0, 40));
    e.view.dtype = known->dtype;
  }
  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2)
    fail(ErrorCode::kInvalidArgument, path, where + ": data_offsets: expected two numbers");
  e.begin = whole_number(offsets[0], path, where + ": data_offsets");
  e.end = whole_number(offsets[1], path, where + ": data_offsets");
  if (e.begin > e.end || e.end > data_bytes)
    fail(ErrorCode::kInvalidArgument, path,
         where + ": data_offsets: expected a range within " + std::to_string(data_bytes) +
             " bytes, found " + offsets.dump());
  if (wanted) read_shape(value["shape"], path, name, e);
  return e;
}

size_t padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void Safetensors::Free::operator()(std::byte* p) const { release(p); }

Safetensors Safetensors::load(const std::string& path, uint64_t file_bytes, const Source& source,
                              const Wanted& wanted) {
  if (file_bytes < kLengthBytes)
    fail(ErrorCode::kInvalidArgument, path,
         "expected at least 8 bytes, found " + std::to_string(file_bytes));
  std::array<std::byte, kLengthBytes> prefix;
  source(0, prefix);
  uint64_t length = 0;  // little-endian, assembled byte by byte
  for (size_t i = 0; i < kLengthBytes; ++i)
    length |= std::to_integer<uint64_t>(prefix[i]) << (8 * i);
  if (length > kMaxHeader || length > file_bytes - kLengthBytes)
    fail(ErrorCode::kInvalidArgument, path,
         "header length: expected at most " +
             std::to_string(std::min<uint64_t>(kMaxHeader, file_bytes - kLengthBytes)) +
             " bytes, found " + std::to_string(length));
  std::string text(length, ' ');
  source(kLengthBytes, std::as_writable_bytes(std::span(text)));
  const uint64_t data_begin = kLengthBytes + length, data_bytes = file_bytes - data_begin;
  const json header = parse_header(path, text);

  Safetensors result;
  result.path_ = path;
  std::vector<std::pair<std::string, Entry>> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries.emplace_back(name, read_entry(path, name, value, data_bytes, wanted(name)));
      continue;
    }
    if (!value.is_object()) fail(ErrorCode::kInvalidArgument, path, "metadata: not an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string())
        fail(ErrorCode::kInvalidArgument, path, "metadata '" + key + "': expected a string");
      result.metadata_[key] = entry.get<std::string>();
    }
  }

  // The format allows neither overlaps nor holes: sorted, the ranges must tile the data exactly.
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  uint64_t at = 0;
  for (const auto& [name, e] : entries) {
    if (e.begin != at)
      fail(ErrorCode::kInvalidArgument, path,
           "tensor '" + name + "': data_offsets: expected to begin at " + std::to_string(at) +
               " (no overlap, no hole), found " + std::to_string(e.begin));
    at = e.end;
  }
  if (at != data_bytes)
    fail(ErrorCode::kInvalidArgument, path,
         "expected " + std::to_string(at) + " bytes of data, found " + std::to_string(data_bytes));

  std::erase_if(entries, [&](const auto& named) { return !wanted(named.first); });
  size_t total = kAlign;
  for (const auto& [name, e] : entries) total += padded(e.end - e.begin);
  result.memory_.reset(static_cast<std::byte*>(allocate(total)));
  std::byte* next = result.memory_.get();
  for (auto& [name, e] : entries) {
    if (e.end > e.begin) source(data_begin + e.begin, {next, e.end - e.begin});
    e.view.data = next;
    next += padded(e.end - e.begin);
    result.tensors_.emplace(name, e.view);
  }
  return result;
}

Safetensors Safetensors::parse(std::span<const std::byte> file, const std::string& path) {
  const auto copy = [&](uint64_t begin, std::span<std::byte> to) {
    std::copy_n(file.begin() + static_cast<std::ptrdiff_t>(begin), to.size(), to.begin());
  };
  return load(path, file.size(), copy, [](const std::string&) { return true; });
}

Safetensors Safetensors::read(const std::string& path) {
  return read(path, [](const std::string&) { return true; });
}

Safetensors Safetensors::read(const std::string& path, const Wanted& wanted) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    fail(ErrorCode::kRuntime, path, error ? error.message() : "not a file");
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  if (error || !stream) fail(ErrorCode::kRuntime, path, "cannot be opened");
  const auto copy = [&](uint64_t begin, std::span<std::byte> to) {
    stream.seekg(static_cast<std::streamoff>(begin));
    stream.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(to.size()));
    if (static_cast<uint64_t>(stream.gcount()) != to.size())
      fail(ErrorCode::kRuntime, path, "ended while it was read");
  };
  return load(path, size, copy, wanted);
}

const Tensor& Safetensors::at(const std::string& name) const {
  if (const auto found = tensors_.find(name); found != tensors_.end()) return found->second;
  std::string names;
  for (const auto& [known, view] : tensors_) names += (names.empty() ? "" : ", ") + known;
  fail(ErrorCode::kInvalidArgument, path_, "expected a tensor '" + name + "', found " + names);
}

double Safetensors::number(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end())
    fail(ErrorCode::kInvalidArgument, path_, "expected metadata '" + key + "'");
  char* end = nullptr;
  const double value = std::strtod(found->second.c_str(), &end);
  if (found->second.empty() || *end != '\0' || !std::isfinite(value))
    fail(ErrorCode::kInvalidArgument, path_,
         "metadata '" + key + "': expected a number, found '" + found->second + "'");
  return value;
}

namespace {

// Appends the elements of a strided view in row-major order.
void append(const Tensor& t, int dim, int64_t offset, std::vector<std::byte>& out) {
  const int64_t size = size_of(t.dtype);
  const auto* data = static_cast<const std::byte*>(t.data);
  for (int64_t i = 0; i < t.shape[dim]; ++i) {
    const int64_t at = offset + i * t.stride[dim];
    if (dim < 3 && dim + 1 < t.rank) append(t, dim + 1, at, out);
    else out.insert(out.end(), data + at * size, data + (at + 1) * size);
  }
}

}  // namespace

std::vector<std::byte> encode_safetensors(
    const std::vector<std::pair<std::string, Tensor>>& tensors,
    const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::vector<std::byte> data;
  for (const auto& [name, t] : tensors) {
    if (!t || header.contains(name))
      fail(ErrorCode::kInvalidArgument, name, t ? "the name appears twice" : "no tensor given");
    const size_t begin = data.size();
    append(t, 0, 0, data);
    const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const TypeName& n) { return n.dtype == t.dtype; });
    header[name] = {{"dtype", type->name},
                    {"shape", std::vector<int64_t>(t.shape.begin(), t.shape.begin() + t.rank)},
                    {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data begins at a multiple of 8
  std::vector<std::byte> file;
  file.reserve(kLengthBytes + text.size() + data.size());
  for (size_t i = 0; i < kLengthBytes; ++i)
    file.push_back(static_cast<std::byte>(text.size() >> (8 * i)));
  const auto* chars = reinterpret_cast<const std::byte*>(text.data());
  file.insert(file.end(), chars, chars + text.size());
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<std::byte> file = encode_safetensors(tensors, metadata);
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(file.data()),
               static_cast<std::streamsize>(file.size()));
  if (!stream.flush()) fail(ErrorCode::kRuntime, path, "cannot be written");
}

}  // namespace winnow::tools
