// safetensors: round trips, every kind of damage by name, and thousands of mutated files.
#include "safetensors.h"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "accuracy.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using testing::draw;
using tools::Safetensors;
using Bytes = std::vector<std::byte>;

// A file with this header, its length field right, and `data` zero bytes after it.
Bytes file_of(const std::string& header, size_t data) {
  Bytes file;
  for (size_t i = 0; i < 8; ++i) file.push_back(static_cast<std::byte>(header.size() >> (8 * i)));
  for (char c : header) file.push_back(static_cast<std::byte>(c));
  file.resize(file.size() + data);
  return file;
}

Bytes sample() {
  static const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  static const std::vector<int32_t> b = {-1, INT32_MIN, 7};
  static const std::vector<int64_t> c = {int64_t{1} << 40};
  static const std::vector<uint8_t> d = {1, 2, 3, 4, 5};
  return tools::encode_safetensors({{"a", tensor(a.data(), {2, 3})},
                                    {"b", tensor(b.data(), {3, 1, 1})},
                                    {"c", tensor(c.data(), {1})},
                                    {"d", tensor(d.data(), {5})},
                                    {"empty", tensor(a.data(), {0, 4})},
                                    {"columns", tensor(a.data(), {3, 2}, {1, 3})}},
                                   {{"scale", "0.25"}, {"who", "a test"}});
}

TEST(Safetensors, RoundTrip) {
  const Safetensors s = Safetensors::parse(sample(), "sample");
  EXPECT_EQ(s.tensors().size(), 6u);
  for (const auto& [name, t] : s.tensors())
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data) % 64, 0u) << name;
  EXPECT_EQ(tools::element(s.at("a"), 5), 6);
  EXPECT_EQ(tools::element(s.at("b"), 1), INT32_MIN);
  EXPECT_EQ(tools::element(s.at("c"), 0), 0x1p40);
  EXPECT_EQ(tools::element(s.at("d"), 4), 5);
  EXPECT_EQ(s.at("empty").size(), 0);
  EXPECT_TRUE(s.at("empty"));
  EXPECT_EQ(tools::element(s.at("columns"), 1), 4);  // stored transposed
  EXPECT_EQ(s.number("scale"), 0.25);
  testing::expect_invalid([&] { s.number("who"); }, {"sample", "who", "a test"});
  testing::expect_invalid([&] { s.number("nobody"); }, {"metadata", "nobody"});
  testing::expect_invalid([&] { s.at("z"); }, {"'z'", "a, b, c"});
}

TEST(Safetensors, FilesOnDisk) {
  const std::string path = ::testing::TempDir() + "winnow_safetensors_test.safetensors";
  const std::vector<float> a = {1, 2};
  tools::write_safetensors(path, {{"a", tensor(a.data(), {2})}});
  EXPECT_EQ(tools::element(Safetensors::read(path).at("a"), 1), 2);
  std::filesystem::remove(path);
  testing::expect_error([&] { Safetensors::read(path); }, ErrorCode::kRuntime,
                        {"safetensors", path.c_str()});
  testing::expect_error([] { Safetensors::read("/"); }, ErrorCode::kRuntime, {"not a file"});
  testing::expect_error([&] { tools::write_safetensors("/", {}); }, ErrorCode::kRuntime,
                        {"cannot be written"});
  testing::expect_invalid(
      [&] {
        tools::encode_safetensors({{"a", tensor(a.data(), {2})}, {"a", tensor(a.data(), {2})}});
      },
      {"twice"});
  testing::expect_invalid([] { tools::encode_safetensors({{"a", Tensor{}}}); }, {"no tensor"});
}

// Of a checkpoint's shard the tensors of one layer: the others may have any dtype and any shape.
TEST(Safetensors, WantedTensorsAlone) {
  const std::string path = ::testing::TempDir() + "winnow_safetensors_wanted.safetensors";
  const auto store = [&](const std::string& header, size_t data) {
    const Bytes file = file_of(header, data);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(file.data()),
               static_cast<std::streamsize>(file.size()));
  };
  const auto read = [&] {
    return Safetensors::read(path, [](const std::string& name) { return name == "mine"; });
  };
  const std::string mine = R"("mine":{"dtype":"U8","shape":[2],"data_offsets":[4,6]})";
  store(R"({"codes":{"dtype":"I8","shape":[1,1,1,2,2],"data_offsets":[0,4]},)" + mine + "}", 6);
  const Safetensors s = read();
  EXPECT_TRUE(s.has("mine"));
  EXPECT_FALSE(s.has("codes"));
  EXPECT_EQ(s.at("mine").size(), 2);
  EXPECT_THROW(Safetensors::read(path), Error);
  store(R"({"codes":{"dtype":"I8","shape":[5],"data_offsets":[0,5]},)" + mine + "}", 6);
  testing::expect_invalid([&] { read(); }, {"'mine'", "expected to begin at 5"});
  store(R"({"codes":{"dtype":"I8","shape":[9],"data_offsets":[0,9]},)" + mine + "}", 6);
  testing::expect_invalid([&] { read(); }, {"'codes'", "within 6 bytes"});
  std::filesystem::remove(path);
}

TEST(Safetensors, ScalarsAndPadding) {
  const Safetensors s = Safetensors::parse(
      file_of(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}    )", 4), "f");
  EXPECT_EQ(s.at("s").rank, 1);
  EXPECT_EQ(s.at("s").size(), 1);
  EXPECT_TRUE(Safetensors::parse(file_of("{}", 0), "f").tensors().empty());
}

TEST(Safetensors, DamageIsNamed) {
  const auto expect = [](const Bytes& file, std::initializer_list<const char*> words,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
    testing::expect_error([&] { Safetensors::parse(file, "f"); }, code, words);
  };
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& at) {
    return "{\"t\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + at + "}}";
  };
  expect({}, {"at least 8 bytes", "found 0"});
  Bytes huge(16, std::byte{0xff});
  expect(huge, {"header length", "18446744073709551615"});
  Bytes cut = file_of(one("\"U8\"", "[8]", "[0,8]"), 8);
  cut.pop_back();
  expect(cut, {"'t'", "data_offsets", "7 bytes"});
  expect(file_of("[]", 0), {"not a JSON object"});
  expect(file_of("", 0), {"header"});
  expect(file_of("{\"t\":", 0), {"header"});
  expect(file_of("{\"\xff\":1}", 0), {"header"});
  expect(file_of("{\"t\":1}", 0), {"'t'", "expected dtype, shape and data_offsets"});
  expect(file_of(one("\"F16\"", "[2]", "[0,4]"), 4), {"dtype", "BF16", "F16"},
         ErrorCode::kUnsupported);
  expect(file_of(one("7", "[2]", "[0,4]"), 4), {"dtype", "7"});
  expect(file_of(one("\"U8\"", "[1,1,1,1,1]", "[0,1]"), 1), {"shape", "at most 4", "5"},
         ErrorCode::kUnsupported);
  expect(file_of(one("\"U8\"", "[-1]", "[0,1]"), 1), {"shape", "whole number", "-1"});
  expect(file_of(one("\"U8\"", "[1.5]", "[0,1]"), 1), {"shape", "1.5"});
  expect(file_of(one("\"U8\"", "{}", "[0,1]"), 1), {"shape", "array"});
  expect(file_of(one("\"U8\"", "[9223372036854775808]", "[0,1]"), 1), {"shape", "64 bits"});
  expect(file_of(one("\"U8\"", "[4294967296,4294967296]", "[0,1]"), 1), {"shape", "64 bits"});
  expect(file_of(one("\"F32\"", "[4611686018427387904]", "[0,1]"), 1), {"shape", "64 bits"});
  expect(file_of(one("\"F32\"", "[2]", "[0,4]"), 4), {"takes 8 bytes", "hold 4"});
  expect(file_of(one("\"U8\"", "[1]", "[1,0]"), 1), {"data_offsets"});
  expect(file_of(one("\"U8\"", "[1]", "[0,18446744073709551615]"), 1), {"data_offsets"});
  expect(file_of(one("\"U8\"", "[1]", "[0]"), 1), {"data_offsets", "two numbers"});
  expect(file_of(one("\"U8\"", "[1]", "[1,2]"), 2), {"begin at 0", "found 1"});
  expect(file_of(one("\"U8\"", "[1]", "[0,1]"), 2), {"expected 1 bytes of data, found 2"});
  const std::string t = R"("t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  expect(file_of("{" + t + "," + t + "}", 2), {"'t'", "twice"});
  expect(file_of("{" + t + R"(,"u":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3),
         {"'u'", "overlap"});
  expect(file_of(R"({"t":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2),
         {"dtype", "twice"});
  expect(file_of(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":0}})", 2), {"'t'"});
  expect(file_of(R"({"__metadata__":[]})", 0), {"metadata"});
  expect(file_of(R"({"__metadata__":{"k":1}})", 0), {"metadata", "'k'", "string"});
  expect(file_of(std::string(100000, '['), 0), {"header", "deep"});
}

// Every prefix of a file, then flipped, inserted, removed and repeated bytes: an Error or a file
// whose every element can be read (the address sanitizer watches), and nothing else.
void survives(const Bytes& file) {
  try {
    const Safetensors s = Safetensors::parse(file, "mutated");
    for (const auto& [name, t] : s.tensors())
      for (int64_t i = 0; i < t.size(); ++i) tools::element(t, i);
  } catch (const Error&) {
  }
}

TEST(Safetensors, PrefixesNeverCrash) {
  const Bytes whole = sample();
  for (size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THROW(Safetensors::parse({whole.data(), n}, "prefix"), Error) << n;
  }
}

TEST(Safetensors, MutationsNeverCrash) {
  const Bytes whole = sample();
  testing::Rng rng(11);
  const char* words[] = {
      "0", "-1",   "99999999999999999999", "[",        "]",     "{",   "}",       "\"",
      ",", "null", "4611686018427387904",  "\"BF16\"", "[0,0]", "1e9", "\\u0000", "\xc3"};
  for (int round = 0; round < 20000; ++round) {
    Bytes file = whole;
    for (int64_t edits = draw(rng, 1, 4); edits > 0 && !file.empty(); --edits) {
      const auto at = file.begin() + draw(rng, 0, static_cast<int64_t>(file.size()) - 1);
      const int64_t run = std::min<int64_t>(draw(rng, 1, 16), file.end() - at);
      switch (draw(rng, 0, 4)) {
        case 0: *at ^= static_cast<std::byte>(1u << draw(rng, 0, 7)); break;
        case 1: *at = static_cast<std::byte>(draw(rng, 0, 255)); break;
        case 2: file.erase(at, at + run); break;
        case 3: file.insert(at, draw(rng, 1, 8), *at); break;
        default: {
          const std::string_view word = words[draw(rng, 0, std::size(words) - 1)];
          const auto* text = reinterpret_cast<const std::byte*>(word.data());
          file.insert(file.erase(at, at + run), text, text + word.size());
        }
      }
    }
    survives(file);
  }
}

TEST(Golden, FilesAreWhole) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(WINNOW_TEST_DATA) + "/golden")) {
    if (entry.path().extension() != ".safetensors") continue;
    const Safetensors s = Safetensors::read(entry.path());
    for (const char* name : {"q", "out", "lse"}) EXPECT_TRUE(s.has(name)) << entry.path();
    EXPECT_GT(s.number("softmax_scale"), 0);
    ++files;
  }
  EXPECT_EQ(files, 6);
}

TEST(Accuracy, SharesOfTheBound) {
  const std::vector<float> want = {1, 0, 100, INFINITY};
  std::vector<float> got = {1.0005f, 0, 101, INFINITY};
  const Tensor w = tensor(want.data(), {2, 2}), g = tensor(got.data(), {2, 2});
  tools::Deviation d = tools::compare(g, w, {1e-3, 2.0 / 128});
  EXPECT_TRUE(d.ok);
  EXPECT_NEAR(d.worst, 0.64, 1e-3);  // 1 of 100 against 2/128
  EXPECT_EQ(d.at, 2);
  EXPECT_EQ(tools::place(w, d.at), "[1, 0]");
  EXPECT_FALSE(tools::compare(g, w, tools::kExact).ok);
  EXPECT_TRUE(tools::compare(w, w, tools::kExact).ok);
  EXPECT_FALSE(tools::compare(g, w, {1e-3, 2.0 / 128, 1e-9}).ok);  // the cosine alone
  got[3] = -INFINITY;
  d = tools::compare(g, w, {1e-3, 2.0 / 128});
  EXPECT_FALSE(d.ok);
  EXPECT_EQ(d.at, 3);
  got[3] = NAN;
  EXPECT_EQ(tools::compare(g, w, {1e-3, 2.0 / 128}).wrong, 1);
  testing::expect_invalid([&] { tools::compare(tensor(want.data(), {4}), w, tools::kExact); },
                          {"[2, 2]", "[4]"});
}

}  // namespace
}  // namespace winnow
