// A C call whose argument struct was damaged: fields that no caller should set so. What cannot be
// told from the truth (a view that claims more memory than it has) is left out.
#pragma once

#include <deque>
#include <functional>

#include "target.h"
#include "winnow/winnow_c.h"

namespace winnow::testing {

class DamagedCall {
 public:
  explicit DamagedCall(Source& s) : s_(s) {}
  // Instead of damage: `repeat` makes the call, as often as it likes.
  using Repeat = std::function<void(DamagedCall&, const std::function<winnow_status()>&)>;
  DamagedCall(Source& s, Repeat repeat) : s_(s), repeat_(std::move(repeat)) {}

  // One of `count` forms of a call.
  int64_t choose(int64_t count) { return s_.draw(0, count - 1); }
  // Views of memory of their own. Numbers inside are small, now and then hostile.
  winnow_tensor in(winnow_dtype dtype, std::initializer_list<int64_t> shape) {
    return view(dtype, shape, false);
  }
  winnow_tensor out(winnow_dtype dtype, std::initializer_list<int64_t> shape) {
    return view(dtype, shape, true);
  }
  winnow_cache cache(winnow_format format, int32_t page, int64_t pages, bool written = false) {
    int64_t bytes = 0;
    EXPECT_EQ(winnow_page_bytes(format, page, &bytes), WINNOW_OK);
    Block& b = block(static_cast<size_t>(bytes * pages), written);
    winnow_cache c{};
    c.data = b.data();
    c.format = format;
    c.page = page;
    c.pages = pages;
    return c;
  }
  // Fields that may be damaged.
  void tensors(std::initializer_list<winnow_tensor*> fields) {
    for (winnow_tensor* t : fields) tensors_.push_back({t, *t});
  }
  void caches(std::initializer_list<winnow_cache*> fields) {
    for (winnow_cache* c : fields) caches_.push_back({c, *c});
  }
  void ints(std::initializer_list<int32_t*> fields) { ints_.insert(ints_.end(), fields); }
  void longs(std::initializer_list<int64_t*> fields) { longs_.insert(longs_.end(), fields); }

  // Damages the struct and makes the call.
  template <class Args>
  void run(Args& args, winnow_status (*call)(const Args*)) {
    if (repeat_) {
      repeat_(*this, [&] { return call(&args); });
      return;
    }
    args.target.kernel = s_.draw(0, 3) == 0 ? "reference" : nullptr;
    for (int64_t n = draw(s_, 0, 3); n > 0; --n) damage(args);
    undo_lies();
    expect_whole(call(&args));
  }

  // A status that there is; where the call failed, a message, and not a byte of an output written.
  void expect_whole(winnow_status status) const {
    EXPECT_TRUE(status >= WINNOW_OK && status <= WINNOW_RUNTIME) << status;
    if (status == WINNOW_OK) return;
    EXPECT_NE(std::string(winnow_last_error()).find(": "), std::string::npos)
        << "status " << status << ": " << winnow_last_error();
    for (const Block& b : blocks_)
      if (b.output && b.bytes.values() != std::vector<uint8_t>(b.bytes.size(), kPoison))
        ADD_FAILURE() << "written although it failed: " << winnow_last_error();
  }
  // The bytes of every output, and poison in their place.
  std::vector<uint8_t> outputs() const {
    std::vector<uint8_t> all;
    for (const Block& b : blocks_)
      if (b.output) all.insert(all.end(), b.bytes.data(), b.bytes.data() + b.bytes.size());
    return all;
  }
  void poison() {
    for (Block& b : blocks_)
      if (b.output) b.bytes.poison();
  }

 private:
  __extension__ using Wide = __int128;  // sums of products of two fields
  static constexpr uint8_t kPoison = Guarded<uint8_t>::kPoison;
  static constexpr int64_t kMost = 1 << 16;  // elements of a view
  static constexpr int kSlack = 16;          // behind a view, for one that is moved by a byte

  struct Block {
    Block(size_t count, bool is_output) : bytes(count), output(is_output) {}
    Guarded<uint8_t> bytes;
    bool output;
    uint8_t* data() { return bytes.data(); }
  };
  Block& block(size_t bytes, bool output) { return blocks_.emplace_back(bytes + kSlack, output); }

  winnow_tensor view(winnow_dtype dtype, std::initializer_list<int64_t> shape, bool output) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    Block& b = block(static_cast<size_t>(count * size_of(static_cast<DType>(dtype))), output);
    if (!output) fill(b.data(), dtype, count);
    return winnow_tensor_of(b.data(), dtype, static_cast<int32_t>(shape.size()), shape.begin());
  }
  void fill(uint8_t* data, winnow_dtype dtype, int64_t count) {
    const bool odd = s_.draw(0, 3) == 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t r = s_();
      const int64_t number =
          odd && r % 5 == 0 ? kOdd[(r >> 8) % std::size(kOdd)] : static_cast<int64_t>(r >> 8) % 3;
      const auto small = static_cast<int32_t>(number);
      const float real = static_cast<float>(static_cast<int64_t>(r % 17) - 8) / 8;
      switch (dtype) {
        case WINNOW_I32: std::memcpy(data + 4 * i, &small, 4); break;
        case WINNOW_I64: std::memcpy(data + 8 * i, &number, 8); break;
        case WINNOW_F32: std::memcpy(data + 4 * i, &real, 4); break;
        case WINNOW_BF16: {
          const bf16 x = to_bf16(real);
          std::memcpy(data + 2 * i, &x, 2);
          break;
        }
        default: data[i] = static_cast<uint8_t>(r);
      }
    }
  }

  int64_t odd() { return kOdd[draw(s_, 0, std::ssize(kOdd) - 1)]; }

  template <class Args>
  void damage(Args& args) {
    const int64_t kind = draw(s_, 0, 9);
    if (kind == 0) {
      const size_t sizes[] = {0, 1, 8, sizeof(Args) - 8, sizeof(Args) + 8, SIZE_MAX};
      args.struct_size = sizes[draw(s_, 0, 5)];
    } else if (kind == 1) {
      const int32_t device = draw32(s_, 0, 3);
      args.target.device.kind = device == 1 ? 1 : device == 2 ? 99 : -1;
      args.target.device.index = 63;
    } else if (kind == 2) {
      args.target.kernel = s_.draw(0, 1) ? "" : "no such kernel";
    } else if (kind == 3 && !ints_.empty()) {
      *ints_[draw(s_, 0, std::ssize(ints_) - 1)] = static_cast<int32_t>(odd());
    } else if (kind == 4 && !longs_.empty()) {
      *longs_[draw(s_, 0, std::ssize(longs_) - 1)] = odd();
    } else if (kind == 5 && !caches_.empty()) {
      damage_cache(*caches_[draw(s_, 0, std::ssize(caches_) - 1)].field);
    } else if (!tensors_.empty()) {
      damage_tensor(*tensors_[draw(s_, 0, std::ssize(tensors_) - 1)].field);
    }
  }
  void damage_tensor(winnow_tensor& t) {
    const int64_t i = draw(s_, 0, 3);
    switch (draw(s_, 0, 7)) {
      case 0: t.data = nullptr; break;
      case 1:
        if (t.data) t.data = static_cast<uint8_t*>(t.data) + 1;
        break;
      case 2: t.rank = draw32(s_, -1, 5); break;
      case 3: t.dtype = draw32(s_, -1, 7); break;
      case 4: t.shape[i] = odd(); break;
      case 5: t.stride[i] = odd(); break;
      case 6: t = {}; break;
      // Of a number that may be damaged already.
      default: __builtin_add_overflow(t.shape[i], draw(s_, -1, 1), &t.shape[i]);
    }
  }
  void damage_cache(winnow_cache& c) {
    switch (draw(s_, 0, 5)) {
      case 0: c.data = nullptr; break;
      case 1: c.format = draw32(s_, -1, 6); break;
      case 2: c.page = static_cast<int32_t>(odd()); break;
      case 3: c.pages = odd(); break;
      case 4: c.page_stride = odd(); break;
      default:
        if (c.data) c.data = static_cast<uint8_t*>(c.data) + 1;
    }
  }

  int64_t room(const void* data) {
    for (Block& b : blocks_)
      if (data >= b.data() && data < b.data() + b.bytes.size())
        return b.data() + b.bytes.size() - static_cast<const uint8_t*>(data);
    return 0;
  }
  // A view that a caller could have meant, if only it had the memory, becomes what it was.
  void undo_lies() {
    for (const auto& [field, was] : tensors_)
      if (lies(*field)) *field = was;
    for (const auto& [field, was] : caches_)
      if (lies(*field)) *field = was;
  }
  bool lies(const winnow_tensor& t) {
    if (!t.data || t.rank < 1 || t.rank > 4 || t.dtype < 0 || t.dtype > WINNOW_U8) return false;
    Wide last = 0, count = 1;
    for (int32_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] < 0 || t.stride[i] < 0) return false;
      if (t.shape[i] == 0) return false;
      last += static_cast<Wide>(t.shape[i] - 1) * t.stride[i];
      count *= t.shape[i];
      if (last > INT64_MAX / 16 || count > INT64_MAX) return false;  // no caller has that much
    }
    return count > kMost || (last + 1) * size_of(static_cast<DType>(t.dtype)) > room(t.data);
  }
  bool lies(const winnow_cache& c) {
    int64_t bytes = 0;
    if (!c.data || c.page < 1 || c.pages < 1) return false;
    if (winnow_page_bytes(c.format, c.page, &bytes) != WINNOW_OK) return false;
    if (c.page_stride != 0 && c.page_stride < bytes) return false;
    const Wide all = static_cast<Wide>(c.page_stride ? c.page_stride : bytes) * c.pages;
    return all <= INT64_MAX && all > room(c.data);
  }

  static constexpr int64_t kOdd[] = {-1,
                                     0,
                                     1,
                                     2,
                                     3,
                                     64,
                                     -2,
                                     INT32_MAX,
                                     INT32_MIN,
                                     int64_t{1} << 31,
                                     int64_t{1} << 32,
                                     int64_t{1} << 62,
                                     INT64_MAX,
                                     INT64_MIN};
  template <class T>
  struct Field {
    T* field;
    T was;
  };
  Source& s_;
  Repeat repeat_;
  std::deque<Block> blocks_;
  std::vector<Field<winnow_tensor>> tensors_;
  std::vector<Field<winnow_cache>> caches_;
  std::vector<int32_t*> ints_;
  std::vector<int64_t*> longs_;
};

}  // namespace winnow::testing
