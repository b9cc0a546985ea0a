// plan: what the routes of a prefill cost, end to end, for one request of `context` tokens of which
// the last `tokens` are new: the measurements behind plan/route.cpp. V3.2:
//
//   direct    absorb_query, attend from the fp8 pages, project_output
//   gathered  absorb_query, gather the whole sequence, attend from those bf16 rows, project_output
//   mha       gather, decompress, attend_mha; where the context is beyond the top-k with the bits
//             of topk_mask, which are counted too
//
// Every token attends to the top-k of the tokens before it, in ascending order as select() gives
// them, spread evenly: neighbours share next to none beyond what the context forces. Choosing them
// (score, select, locate) costs the same on every route and is not counted. FLOP: those that the
// route has to spend, mha's over the whole of the causal triangle. V4 has no projections and no
// mha: a window of 128 and 512 or 1,024 compressed states (of 64 and 128 heads), one for four
// tokens, drawn at random; gathering takes both.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cpu/threads.h"
#include "harness.h"
#include "problems.h"
#include "winnow/absorb.h"

namespace winnow::route_bench {
namespace {

constexpr int64_t kLatent = 512, kNope = 128, kRope = 64, kValue = 128, kTopk = 2048;
constexpr int64_t kLongestMha = 16384;  // decompressed, 128 heads of a token take 80 KB

struct Shape {
  int64_t heads, tokens, context;
};

class Prefill {
 public:
  Prefill(const Device& device, const Shape& s)
      : s_(s),
        sizes_{.heads = s.heads, .s_q = s.tokens, .context = s.context, .device = device},
        placement_(device),
        rows_(placement_.room(buffers_[0], {s.context, kLatent + kRope})),
        gather_(sizes_, rows_.data) {
    tools::Random random(1);
    const Tensor q = placement_.normals(buffers_[1], {s.tokens, s.heads, kNope + kRope}, random);
    // Weights with the heads outermost, as a loader that reads them once lays them out.
    const auto weight = [&](int i, int64_t columns) {
      Tensor w = placement_.normals(buffers_[i], {s.heads, kLatent, columns}, random, 0.05f);
      std::swap(w.shape[0], w.shape[1]);
      std::swap(w.stride[0], w.stride[1]);
      return w;
    };
    const Tensor w_uk = weight(2, kNope), w_uv = weight(3, kValue);
    Tensor nope = q, rope = q;
    nope.shape[2] = kNope;
    rope.shape[2] = kRope;
    rope.data = static_cast<bf16*>(q.data) + kNope;
    const Tensor latent = placement_.room(buffers_[4], {s.tokens, s.heads, kLatent});
    const Tensor attended = placement_.room(buffers_[5], {s.tokens, s.heads, kLatent});
    const Tensor out = placement_.room(buffers_[6], {s.tokens, s.heads, kValue});
    choose();
    const Target target{.device = device};
    absorb_ = {.q_nope = nope, .w_uk = w_uk, .out = latent, .target = target};
    project_ = {.attn = attended, .w_uv = w_uv, .out = out, .target = target};
    attend_ = {.q = latent, .q_rope = rope, .scale = 0.072f, .out = attended, .target = target};
    attend_.lists[0].lengths = placement_.copied(lengths_, {s.tokens});
    if (s.context <= kLongestMha) {
      decompress_ = {.latent = rows_,
                     .w_uk = w_uk,
                     .w_uv = w_uv,
                     .k = placement_.room(buffers_[7], {s.context, s.heads, kNope + kRope}),
                     .v = placement_.room(buffers_[8], {s.context, s.heads, kValue}),
                     .target = target};
      mha_ = {.q = q, .k = decompress_.k, .v = decompress_.v, .scale = 0.072f, .out = out};
      mha_.lengths = placement_.copied(ends_, {s.tokens});
      mha_.target = target;
      if (s.context > kTopk) {
        bits_.ids = placement_.copied(ids_, {s.tokens, width_});
        bits_.target = target;
        mha_.bits = bits_.mask = placement_.room(mask_, {s.tokens, s.context / 8});
      }
    }
  }

  void measure(bench::Runner& runner, bench::Case c) {
    const std::string name = c.name;
    const auto h = static_cast<double>(s_.heads), t = static_cast<double>(s_.tokens);
    const auto n = static_cast<double>(s_.context);
    const double projections = 2 * h * t * kLatent * (kNope + kValue);
    const double keys = std::accumulate(lengths_.begin(), lengths_.end(), 0.0);
    const double before = std::accumulate(ends_.begin(), ends_.end(), 0.0);
    KvList& list = attend_.lists[0];
    c.flops = projections + 2 * h * keys * (2 * kLatent + kRope);
    c.name = name + " direct";
    list.cache = gather_.cache.cache;
    list.indices = placement_.copied(slots_, {s_.tokens, width_});
    run(runner, c, [&] { attend(attend_); });
    c.name = name + " gathered";
    list.cache = {rows_.data, kV32.bf16, 1, static_cast<int32_t>(s_.context)};
    list.indices = placement_.copied(ids_, {s_.tokens, width_});
    run(runner, c, [&] {
      gather(gather_.args);
      attend(attend_);
    });
    if (s_.context > kLongestMha) return;
    c.name = name + " mha";
    c.flops = 2 * h * (n * kLatent * (kNope + kValue) + before * (kNope + kRope + kValue));
    runner.measure(c, [&] {
      gather(gather_.args);
      decompress(decompress_);
      if (mha_.bits) topk_mask(bits_);
      attend_mha(mha_);
    });
  }

 private:
  template <class F>
  void run(bench::Runner& runner, const bench::Case& c, const F& attention) {
    attend_.workspace = placement_.workspace(workspace_, attend_workspace_bytes(attend_));
    runner.measure(c, [&] {
      absorb_query(absorb_);
      attention();
      project_output(project_);
    });
  }

  // One id from each of `width` even stretches of what a token may see.
  void choose() {
    width_ = std::min(kTopk, s_.context);
    ids_ = tools::Buffer<int32_t>(s_.tokens * width_);
    slots_ = tools::Buffer<int32_t>(s_.tokens * width_);
    lengths_ = tools::Buffer<int32_t>(s_.tokens);
    ends_ = tools::Buffer<int32_t>(s_.tokens);
    internal::cpu::parallel_for(s_.tokens, [&](int64_t t, int) {
      tools::Random random(2 + t);
      const int64_t end = s_.context - s_.tokens + t + 1, count = std::min(end, width_);
      ends_[t] = static_cast<int32_t>(end);
      lengths_[t] = static_cast<int32_t>(count);
      std::ranges::fill(ids_.span(t * width_, width_), -1);
      std::ranges::fill(slots_.span(t * width_, width_), -1);
      for (int64_t i = 0, first = 0, next = 0; i < count; ++i, first = next) {
        next = (i + 1) * end / count;
        const int64_t id = random.draw(first, next - 1), at = t * width_ + i;
        const int64_t page = sizes_.page;
        ids_[at] = static_cast<int32_t>(id);
        slots_[at] = static_cast<int32_t>(gather_.paging.table[id / page] * page + id % page);
      }
    });
  }

  Shape s_;
  bench::Sizes sizes_;
  bench::Placement placement_;
  tools::Buffer<bf16> buffers_[9];
  tools::Buffer<int32_t> ids_, slots_, lengths_, ends_;
  tools::Buffer<std::byte> workspace_;
  Tensor rows_;
  bench::GatherProblem gather_;
  int64_t width_ = 0;
  AbsorbQueryArgs absorb_;
  ProjectOutputArgs project_;
  DecompressArgs decompress_;
  AttendArgs attend_;
  MhaArgs mha_;
  TopkMaskArgs bits_;
  tools::Buffer<uint8_t> mask_;
};

void measure_v4(bench::Runner& runner, bench::Case c, const Shape& s) {
  const std::string name = c.name;
  constexpr int64_t kWindow = 128;
  const int64_t states = s.context / 4, reached = s.tokens + kWindow - 1;
  c.extra = s.heads * 8;
  c.topk = kWindow;
  c.model = std::string(kV4.name);
  bench::Sizes sizes{.model = kV4, .heads = s.heads, .topk = kWindow, .extra = c.extra};
  sizes.s_q = s.tokens;
  sizes.context = s.context;
  sizes.device = runner.device();
  {
    bench::AttendProblem direct(sizes);
    direct.use(c.kernel.c_str());
    c.name = name + " direct";
    c.flops = direct.flops();
    runner.measure(c, [&] { attend(direct.args); });
  }
  bench::Sizes rows = sizes;
  rows.topk += rows.extra;
  rows.extra = 0;
  rows.context = states + reached;
  rows.page = static_cast<int32_t>(rows.context);
  rows.bf16_cache = true;
  bench::AttendProblem attention(rows);
  attention.use(c.kernel.c_str());
  auto* memory = static_cast<bf16*>(attention.cache.cache.data);
  sizes.context = states;
  bench::GatherProblem compressed(sizes, memory);
  sizes.context = reached;
  bench::GatherProblem window(sizes, memory + states * kV4.d_qk);
  c.name = name + " gathered";
  runner.measure(c, [&] {
    gather(window.args);
    gather(compressed.args);
    attend(attention.args);
  });
}

const bench::Suite suite("plan", "routes", [](bench::Runner& runner) {
  const auto run = [&](const Shape& s) {
    bench::Case c{.name = fmt::format("h{} {} of {}", s.heads, s.tokens, s.context)};
    c.kernel = runner.on_cuda() ? "sm90 stages" : "cpu";
    c.model = std::string(kV32.name);
    c.heads = s.heads;
    c.topk = kTopk;
    c.batch = 1;
    c.s_q = s.tokens;
    c.context = s.context;
    if (runner.wants(c)) Prefill(runner.device(), s).measure(runner, c);
  };
  const bool cuda = runner.on_cuda();
  for (const int64_t heads :
       cuda ? std::vector<int64_t>{128, 64, 32, 16} : std::vector<int64_t>{16})
    for (const int64_t context : {256, 1024, 2048, 4096, 8192, 16384, 65536})
      for (const int64_t tokens : {16, 64, 256, 1024, 4096})
        if (tokens <= context && (cuda || tokens * context <= 1 << 20))
          run({heads, tokens, context});
  for (const int64_t heads : {128, 64})
    for (const int64_t context : {4096, 16384, 65536})
      for (const int64_t tokens : {16, 64, 256, 1024})
        if (cuda) {
          bench::Case c{.name = fmt::format("v4 h{} {} of {}", heads, tokens, context)};
          c.kernel = "sm90 stages", c.heads = heads, c.batch = 1, c.s_q = tokens,
          c.context = context;
          if (runner.wants(c)) measure_v4(runner, c, {heads, tokens, context});
        }
});

}  // namespace
}  // namespace winnow::route_bench
