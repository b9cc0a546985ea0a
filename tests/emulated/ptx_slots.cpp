// Registers of PTX are written once or a few times each, and there are thousands: those that are
// not in use at the same time share a slot, so that a warp's registers stay in a cache.
#include <algorithm>
#include <queue>

#include "emulated/ptx.h"

namespace winnow::emulated {
namespace {

using Bits = std::vector<uint64_t>;

bool is_jump(const Instruction& i) { return part_of(i.name, 0) == "bra"; }
bool ends(const Instruction& i) {
  const std::string_view base = part_of(i.name, 0);
  return base == "ret" || base == "exit" || base == "trap";
}
// Whether the first operand is written. Others may be as well: mov and ld of vectors count whole.
bool writes_first(const Instruction& i) {
  const std::string_view base = part_of(i.name, 0);
  return base != "st" && base != "red" && base != "bra" && base != "call" && base != "wgmma" &&
         base != "stmatrix" && base != "bar" && base != "barrier" && base != "st_async" &&
         base != "cp" && base != "prefetch" && base != "mbarrier";
}

class Slots {
 public:
  explicit Slots(Function& f) : f_(f), registers_(f.register_wide.size()) {}

  void assign() {
    if (registers_ > 0) {
      find_blocks();
      find_live();
      find_spans();
      give_slots();
      rename();
    }
    make_constants();
  }

 private:
  struct Block {
    int first, last;  // instructions [first, last)
    std::vector<int> next;
    Bits use, def, in, out;
  };

  template <class F>
  void for_registers(const Operand& o, F&& f) {
    if (o.kind == Operand::kRegister ||
        (o.kind == Operand::kAddress && o.base == Operand::kRegister))
      f(o.at);
    if (o.kind == Operand::kVector)
      for (int k = 0; k < o.count; ++k) for_registers(f_.operands[o.at + k], f);
  }
  template <class Use, class Def>
  void for_uses(const Instruction& i, Use&& use, Def&& def) {
    const bool writes = writes_first(i);
    // What is read counts before what is written, which may be the same register.
    for (const bool written : {false, true})
      for (int k = 0; k < i.count; ++k) {
        const Operand& o = f_.operands[i.first + k];
        const bool result = k == 0 && writes && o.kind != Operand::kAddress;
        for_registers(o, [&](int r) {
          if (!written && (!result || i.guard >= 0)) use(r);
          if (written && result) def(r);
        });
      }
  }

  void find_blocks() {
    const int count = static_cast<int>(f_.code.size());
    std::vector<char> starts(count + 1, 0);
    starts[0] = 1;
    for (int i = 0; i < count; ++i) {
      if (is_jump(f_.code[i])) starts[f_.operands[f_.code[i].first].at] = starts[i + 1] = 1;
      if (ends(f_.code[i])) starts[i + 1] = 1;
    }
    block_of_.assign(count + 1, 0);
    for (int i = 0; i < count; ++i) {
      if (starts[i]) {
        if (!blocks_.empty()) blocks_.back().last = i;
        blocks_.push_back({i, count, {}, {}, {}, {}, {}});
      }
      block_of_[i] = static_cast<int>(blocks_.size()) - 1;
    }
    for (Block& b : blocks_) {
      const Instruction& last = f_.code[b.last - 1];
      if (is_jump(last) && f_.operands[last.first].at < count)
        b.next.push_back(block_of_[f_.operands[last.first].at]);
      const bool falls = !(is_jump(last) || ends(last)) || last.guard >= 0;
      if (falls && b.last < count) b.next.push_back(block_of_[b.last]);
    }
  }

  void find_live() {
    const size_t words = (registers_ + 63) / 64;
    const auto set = [](Bits& bits, int r) { bits[r / 64] |= uint64_t{1} << (r % 64); };
    const auto has = [](const Bits& bits, int r) { return bits[r / 64] >> (r % 64) & 1; };
    for (Block& b : blocks_) {
      b.use = b.def = b.in = b.out = Bits(words);
      for (int i = b.first; i < b.last; ++i)
        for_uses(
            f_.code[i],
            [&](int r) {
              if (!has(b.def, r)) set(b.use, r);
            },
            [&](int r) {
              if (f_.code[i].guard < 0) set(b.def, r);
            });
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t k = blocks_.size(); k-- > 0;) {
        Block& b = blocks_[k];
        for (size_t w = 0; w < words; ++w) {
          uint64_t out = 0;
          for (int n : b.next) out |= blocks_[n].in[w];
          const uint64_t in = b.use[w] | (out & ~b.def[w]);
          changed |= in != b.in[w] || out != b.out[w];
          b.in[w] = in;
          b.out[w] = out;
        }
      }
    }
  }

  void find_spans() {
    begin_.assign(registers_, INT32_MAX);
    end_.assign(registers_, -1);
    const auto touch = [&](int r, int at) {
      begin_[r] = std::min(begin_[r], at);
      end_[r] = std::max(end_[r], at);
    };
    for (const Block& b : blocks_) {
      for (int r = 0; r < static_cast<int>(registers_); ++r) {
        if (b.in[r / 64] >> (r % 64) & 1) touch(r, b.first);
        if (b.out[r / 64] >> (r % 64) & 1) touch(r, b.last);
      }
      for (int i = b.first; i < b.last; ++i)
        for_uses(
            f_.code[i], [&](int r) { touch(r, i); }, [&](int r) { touch(r, i); });
    }
    // The sums of wgmma are written when they are waited for.
    f_.register_kept.assign(registers_, 0);
    for (const Instruction& i : f_.code)
      if (part_of(i.name, 0) == "wgmma" && i.count > 0)
        for_registers(f_.operands[i.first], [&](int r) { f_.register_kept[r] = 1; });
  }

  void give_slots() {
    std::vector<int> order(registers_);
    for (size_t r = 0; r < registers_; ++r) order[r] = static_cast<int>(r);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return begin_[a] < begin_[b]; });
    slot_.assign(registers_, 0);
    std::vector<int> free[2];
    using Busy = std::pair<int, int>;  // its end, the register
    std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy;
    for (const int r : order) {
      if (end_[r] < 0) continue;
      while (!busy.empty() && busy.top().first < begin_[r]) {
        const int old = busy.top().second;
        busy.pop();
        free[f_.register_wide[old]].push_back(slot_[old]);
      }
      const bool wide = f_.register_wide[r];
      if (!f_.register_kept[r] && !free[wide].empty()) {
        slot_[r] = free[wide].back();
        free[wide].pop_back();
      } else {
        slot_[r] = f_.slots;
        f_.slots += wide ? 2 : 1;
      }
      if (!f_.register_kept[r]) busy.emplace(end_[r], r);
    }
  }

  void rename() {
    for (Operand& o : f_.operands)
      if (o.kind == Operand::kRegister ||
          (o.kind == Operand::kAddress && o.base == Operand::kRegister))
        o.at = slot_[o.at] * 32;
  }

  void make_constants() {
    const size_t count = f_.constants.size();
    f_.constant_lanes.resize(count * 96 + 2);
    for (size_t k = 0; k < count; ++k)
      for (int lane = 0; lane < 32; ++lane) {
        reinterpret_cast<uint64_t*>(f_.constant_lanes.data())[k * 32 + lane] = f_.constants[k];
        f_.constant_lanes[count * 64 + k * 32 + lane] = static_cast<uint32_t>(f_.constants[k]);
      }
  }

  Function& f_;
  size_t registers_;
  std::vector<Block> blocks_;
  std::vector<int> block_of_;
  std::vector<int> begin_, end_, slot_;
};

}  // namespace

void assign_slots(Function& function) { Slots(function).assign(); }

}  // namespace winnow::emulated
