#include "golden.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>

#include "accuracy.h"
#include "buffer.h"
#include "core/check.h"
#include "core/formats.h"
#include "device_memory.h"
#include "model/v4.h"
#include "safetensors.h"
#include "winnow/attend.h"
#include "winnow/error.h"
#include "winnow/locate.h"
#include "winnow/model.h"
#include "winnow/support.h"
#include "winnow/write.h"

namespace winnow::tools {

namespace {

constexpr int32_t kPage = 64;  // of the caches made for prefill files, which bring none
constexpr int kPoison = 0xcd;

// One list of a decode file: its tensors, by the prefix of their names.
struct List {
  std::string prefix;  // "" or "extra_"
  Cache cache;         // the file's pages
  Tensor k, cache_bytes, table, logical, physical;
  Tensor lengths;  // [requests]: of all query tokens of a request
};

struct Golden {
  Safetensors data;
  const Model* model;
  bool decode;
  int64_t requests = 1, s_q, heads;  // prefill: one request
  float scale;
  std::vector<List> lists;

  explicit Golden(const std::string& path) : data(Safetensors::read(path)) {
    const double head_dim = data.number("head_dim");
    model = head_dim == kV32.d_qk ? &kV32 : &kV4;
    require(head_dim == model->d_qk, "head_dim", "576 or 512");
    scale = static_cast<float>(data.number("softmax_scale"));
    decode = data.has("cache");
    if (!decode) {
      const Tensor& q = typed("q", DType::kBf16, {kAny, kAny, model->d_qk});
      s_q = q.shape[0];
      heads = q.shape[1];
      typed("out", DType::kBf16, {s_q, heads, model->d_v});
      typed("lse", DType::kF32, {s_q, heads});
      typed("kv", DType::kBf16, {kAny, model->d_qk});
      typed("indices", DType::kI32, {s_q, kAny});
      return;
    }
    const Tensor& q = typed("q", DType::kBf16, {kAny, kAny, kAny, model->d_qk});
    requests = q.shape[0];
    s_q = q.shape[1];
    heads = q.shape[2];
    typed("out", DType::kBf16, {requests, s_q, heads, model->d_v});
    typed("lse", DType::kF32, {requests, heads, s_q});
    lists.push_back(list("", "block_size"));
    if (data.has("extra_cache")) lists.push_back(list("extra_", "extra_block_size"));
  }

  int64_t tokens() const { return requests * s_q; }
  static void require(bool ok, const std::string& what, const std::string& expected) {
    if (!ok) throw Error(ErrorCode::kInvalidArgument, "golden: " + what + ": expected " + expected);
  }
  // What a file says of itself is checked before anything of it is read.
  static constexpr int64_t kAny = Check::kAny;
  const Tensor& typed(const std::string& name, DType dtype,
                      std::initializer_list<int64_t> shape) const {
    const Tensor& t = data.at(name);
    Check("golden").tensor(t, name.c_str(), dtype, shape);
    return t;
  }

  List list(const std::string& prefix, const std::string& page_key) const {
    List l{.prefix = prefix};
    l.cache_bytes = typed(prefix + "cache", DType::kU8, {kAny, kAny});
    l.k = typed(prefix + "k_bf16", DType::kBf16, {l.cache_bytes.shape[0], kAny, model->d_qk});
    l.table = typed(prefix + "block_table", DType::kI32, {requests, kAny});
    l.logical = rows(typed(prefix + "indices_logical", DType::kI32, {requests, s_q, kAny}));
    l.physical = rows(typed(prefix + "indices_physical", DType::kI32, {requests, s_q, kAny}));
    const int64_t page = l.k.shape[1];
    require(data.number(page_key) == static_cast<double>(page), page_key,
            fmt::format("{}, as {}k_bf16 has it", page, prefix));
    require(l.cache_bytes.shape[1] >= page_bytes_used(model->fp8, page), prefix + "cache",
            fmt::format("pages of {} tokens", page));
    l.cache = {.data = l.cache_bytes.data,
               .format = model->fp8,
               .pages = l.cache_bytes.shape[0],
               .page = static_cast<int32_t>(page),
               .page_stride = l.cache_bytes.shape[1]};
    if (data.has(prefix + "topk_length"))
      l.lengths = typed(prefix + "topk_length", DType::kI32, {requests});
    return l;
  }
  // [requests, s_q, heads]; decode files store [requests, heads, s_q].
  Tensor lse() const {
    auto* stored = static_cast<float*>(data.at("lse").data);
    return decode ? tensor(stored, {requests, s_q, heads}, {heads * s_q, 1, s_q})
                  : tensor(stored, {1, s_q, heads});
  }
  // [requests, s_q, K] as [tokens, K].
  Tensor rows(const Tensor& t) const {
    return tensor(static_cast<int32_t*>(t.data), {tokens(), t.shape[2]});
  }
};

std::string family(const std::string& kernel) { return kernel.substr(0, kernel.find('/')); }

std::vector<std::string> kernels_of(const std::string& stage) {
  // The kernels of a family ("sm90/wide") go by its name: the library chooses among them.
  std::vector<std::string> names;
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.available && (names.empty() || names.back() != family(k.kernel)))
      names.push_back(family(k.kernel));
  return names;
}

// The kernel of a verdict, where it runs.
Target target_of(const Verdict& v) {
  for (const KernelInfo& k : support())
    if (family(k.kernel) == v.kernel && k.device == "cuda")
      return {.device = cuda(), .kernel = v.kernel.c_str()};
  return {.kernel = v.kernel.c_str()};
}

// Collects the verdicts of one file.
class Checks {
 public:
  explicit Checks(const std::string& path) : golden_(path) {
    file_ = std::filesystem::path(path).stem().string();
  }

  std::vector<Verdict> run() {
    for (const std::string& kernel : kernels_of("write"))
      each("write", kernel, [&](Verdict& v) { golden_.decode ? write_pages(v) : write_rows(v); });
    for (const std::string& kernel : kernels_of("locate"))
      each("locate", kernel,
           [&](Verdict& v) { golden_.decode ? locate_slots(v) : locate_rows(v); });
    for (const std::string& kernel : kernels_of("attend")) {
      each("attend", kernel, [&](Verdict& v) { attend_all(v, false); });
      if (golden_.decode)  // the same from logical ids: locate inside the kernel
        each("attend ids", kernel, [&](Verdict& v) { attend_all(v, true); });
    }
    return std::move(verdicts_);
  }

 private:
  void each(const std::string& check, const std::string& kernel,
            const std::function<void(Verdict&)>& run) {
    Verdict v{.file = file_, .check = check, .kernel = kernel};
    try {
      run(v);
    } catch (const Error& e) {
      v.skipped =
          e.code() == ErrorCode::kUnsupported && target_of(v).device.kind == DeviceKind::kCuda;
      v.ok = v.skipped;
      v.deviation = e.what();
    }
    verdicts_.push_back(std::move(v));
  }

  // write: every record of the file's pages from its bf16 values, byte for byte.
  void write_pages(Verdict& v) const {
    int64_t wrong = 0, bytes = 0;
    for (const List& l : golden_.lists) {
      const int64_t n = l.cache.pages * l.cache.page;
      Buffer<int64_t> slots(n);
      std::iota(slots.begin(), slots.end(), 0);
      Buffer<std::byte> pages(l.cache_bytes.size());
      std::memset(pages.data(), kPoison, pages.size());
      Cache cache = l.cache;
      cache.data = pages.data();
      write({.kv = tensor(static_cast<bf16*>(l.k.data), {n, golden_.model->d_qk}),
             .slots = tensor(slots.data(), {n}),
             .cache = cache,
             .scale = ScaleMode::kPow2,
             .target = target_of(v)});
      wait_for_device();
      const Buffer<std::byte> want = stored_pages(l);
      wrong += differing(pages.span(), want.data());
      bytes += l.cache_bytes.size();
    }
    v.ok = wrong == 0;
    v.deviation = fmt::format("{} of {} bytes differ (0 allowed)", wrong, bytes);
  }

  // The file's pages. V4's eighth scale byte, which no reader looks at, is whatever the writer's
  // memory held; here it is zero.
  static Buffer<std::byte> stored_pages(const List& l) {
    Buffer<std::byte> pages(l.cache_bytes.size());
    std::memcpy(pages.data(), l.cache_bytes.data, pages.size());
    if (l.cache.format == CacheFormat::kV4Fp8)
      for (int64_t p = 0; p < l.cache.pages; ++p)
        for (int64_t off = 0; off < l.cache.page; ++off)
          pages[p * l.cache.page_stride + V4Fp8::scales(off, l.cache.page) + V4Fp8::kTiles] = {};
    return pages;
  }

  // A prefill file has no pages: its rows go into a bf16 cache, last row first, and come back.
  void write_rows(Verdict& v) const {
    const Tensor& kv = golden_.data.at("kv");
    const int64_t n = kv.shape[0], d = kv.shape[1], pages = (n + kPage - 1) / kPage;
    Buffer<bf16> cache(pages * kPage * d), back(n * d);
    Buffer<int64_t> slots(n);
    for (int64_t i = 0; i < n; ++i) slots[i] = n - 1 - i;
    write({.kv = kv,
           .slots = tensor(slots.data(), {n}),
           .cache =
               {.data = cache.data(), .format = golden_.model->bf16, .pages = pages, .page = kPage},
           .target = target_of(v)});
    wait_for_device();
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(&back[i * d], &cache[slots[i] * d], static_cast<size_t>(d) * sizeof(bf16));
    const int64_t wrong = differing(std::as_writable_bytes(back.span()), kv.data);
    v.ok = wrong == 0;
    v.deviation = fmt::format("{} of {} bytes differ (0 allowed)", wrong, 2 * n * d);
  }

  static int64_t differing(std::span<const std::byte> got, const void* want) {
    const auto* w = static_cast<const std::byte*>(want);
    int64_t wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != w[i];
    return wrong;
  }

  Buffer<int32_t> request_of_token() const {
    Buffer<int32_t> requests(golden_.tokens());
    for (int64_t t = 0; t < golden_.tokens(); ++t)
      requests[t] = static_cast<int32_t>(t / golden_.s_q);
    return requests;
  }

  // A list's lengths by token, or nothing; `memory` keeps them.
  Tensor lengths_of(const List& l, Buffer<int32_t>& memory) const {
    if (!l.lengths) return {};
    const auto* by_request = static_cast<const int32_t*>(l.lengths.data);
    for (int64_t t = 0; t < golden_.tokens(); ++t) memory[t] = by_request[t / golden_.s_q];
    return tensor(memory.data(), {golden_.tokens()});
  }

  // locate: logical ids through the block table.
  void locate_slots(Verdict& v) const {
    const Buffer<int32_t> requests = request_of_token();
    int64_t wrong = 0, count = 0;
    for (const List& l : golden_.lists) {
      Buffer<int32_t> slots(l.logical.size());
      const Tensor got = tensor(slots.data(), {golden_.tokens(), l.logical.shape[1]});
      locate({.ids = l.logical,
              .requests = tensor(requests.data(), {golden_.tokens()}),
              .block_table = l.table,
              .page = l.cache.page,
              .pages = l.cache.pages,
              .slots = got,
              .target = target_of(v)});
      wait_for_device();
      const Deviation d = compare(got, l.physical, kExact);
      wrong += d.wrong;
      count += d.count;
    }
    v.ok = wrong == 0;
    v.deviation = fmt::format("{} of {} slots differ (0 allowed)", wrong, count);
  }

  // A prefill file's indices are rows of a workspace: those inside it stay, all others become -1.
  void locate_rows(Verdict& v) const {
    const Tensor& ids = golden_.data.at("indices");
    const int64_t rows = golden_.data.at("kv").shape[0];
    const Buffer<int32_t> zeros(golden_.tokens()), slots(ids.size()), want(ids.size());
    for (int64_t i = 0; i < ids.size(); ++i) {
      const int32_t id = static_cast<const int32_t*>(ids.data)[i];
      want[i] = id >= 0 && id < rows ? id : -1;
    }
    const Tensor got = tensor(slots.data(), {ids.shape[0], ids.shape[1]});
    locate({.ids = ids,
            .requests = tensor(zeros.data(), {golden_.tokens()}),
            .block_table = tensor(zeros.data(), {1, 1}),
            .pages = 1,
            .prefill_requests = tensor(zeros.data(), {golden_.tokens()}),
            .workspace_starts = tensor(zeros.data(), {1}),
            .workspace_rows = rows,
            .slots = got,
            .target = target_of(v)});
    wait_for_device();
    const Deviation d = compare(got, tensor(want.data(), {ids.shape[0], ids.shape[1]}), kExact);
    v.ok = d.ok;
    v.deviation = fmt::format("{} of {} rows differ (0 allowed)", d.wrong, d.count);
  }

  void attend_all(Verdict& v, bool logical) {
    const Golden& g = golden_;
    const int64_t tokens = g.tokens();
    const Buffer<bf16> out(tokens * g.heads * g.model->d_v);
    const Buffer<float> lse(tokens * g.heads), max_logit(tokens * g.heads);
    const Buffer<int32_t> requests = request_of_token();
    Buffer<int32_t> lengths[2] = {Buffer<int32_t>(tokens), Buffer<int32_t>(tokens)};
    const Tensor& q = g.data.at("q");
    AttendArgs a{.q = tensor(static_cast<bf16*>(q.data), {tokens, g.heads, g.model->d_qk}),
                 .scale = g.scale,
                 .out = tensor(out.data(), {tokens, g.heads, g.model->d_v}),
                 .lse = tensor(lse.data(), {tokens, g.heads}),
                 .max_logit = tensor(max_logit.data(), {tokens, g.heads}),
                 .target = target_of(v)};
    if (g.data.has("attn_sink")) a.sink = g.data.at("attn_sink");
    if (g.decode) {
      for (size_t i = 0; i < g.lists.size(); ++i) {
        const List& l = g.lists[i];
        a.lists[i] = {l.cache, logical ? l.logical : l.physical, lengths_of(l, lengths[i]),
                      logical ? l.table : Tensor{}};
      }
      if (logical) a.requests = tensor(requests.data(), {tokens});
    } else {
      const Tensor& kv = g.data.at("kv");
      a.lists[0].cache = {.data = kv.data,
                          .format = g.model->bf16,
                          .pages = 1,
                          .page = static_cast<int32_t>(kv.shape[0])};
      a.lists[0].indices = g.data.at("indices");
      if (g.data.has("topk_length")) a.lists[0].lengths = g.data.at("topk_length");
    }
    const Buffer<std::byte> workspace(static_cast<int64_t>(attend_workspace_bytes(a)));
    a.workspace = workspace.span();
    attend(a);
    wait_for_device();
    if (!logical && magnitudes_.size() == 0) find_magnitudes(a);
    compare_all(v, a);
  }

  // Every record of a list as fp32 rows.
  static Buffer<float> rows_of(const Cache& cache) {
    const int64_t n = cache.pages * cache.page, d = record_dim(cache.format);
    Buffer<bf16> values(n * d);
    Buffer<int32_t> table(cache.pages), length(1);
    std::iota(table.begin(), table.end(), 0);
    length[0] = static_cast<int32_t>(n);
    gather({.cache = cache,
            .block_table = tensor(table.data(), {1, cache.pages}),
            .lengths = tensor(length.data(), {1}),
            .out = tensor(values.data(), {n, d}),
            .target = {.kernel = "reference"}});
    Buffer<float> rows(n * d);
    for (int64_t i = 0; i < n * d; ++i) rows[i] = to_float(values[i]);
    return rows;
  }

  // sum_j p_j |v_j| of every output, from the file's lse: p_j = e^(s_j - lse), times the sink's
  // share.
  void find_magnitudes(const AttendArgs& a) {
    const Golden& g = golden_;
    const int64_t d = g.model->d_qk, d_v = g.model->d_v;
    magnitudes_ = Buffer<float>(g.tokens() * g.heads * d_v);
    for (const KvList& list : a.lists) {
      if (!list.indices) continue;
      const Buffer<float> rows = rows_of(list.cache);
      const int64_t width = list.indices.shape[1], capacity = list.cache.pages * list.cache.page;
      for (int64_t i = 0; i < g.tokens() * g.heads; ++i) {
        const int64_t t = i / g.heads;
        const auto* q = static_cast<const bf16*>(a.q.data) + i * d;
        const auto* slots = static_cast<const int32_t*>(list.indices.data) + t * width;
        const int64_t length =
            list.lengths ? static_cast<const int32_t*>(list.lengths.data)[t] : width;
        const float lse = static_cast<float>(element(g.lse(), i));
        const float sink = a.sink ? static_cast<const float*>(a.sink.data)[i % g.heads] : -INFINITY;
        for (int64_t k = 0; k < std::min(length, width); ++k) {
          if (slots[k] < 0 || slots[k] >= capacity) continue;
          const float* row = rows.data() + slots[k] * d;
          float dot = 0;
          for (int64_t c = 0; c < d; ++c) dot += to_float(q[c]) * row[c];
          const float p = std::exp(g.scale * dot - lse) / (1 + std::exp(sink - lse));
          for (int64_t c = 0; c < d_v; ++c) magnitudes_[i * d_v + c] += p * std::abs(row[c]);
        }
      }
    }
  }

  void compare_all(Verdict& v, const AttendArgs& a) const {
    const Golden& g = golden_;
    const Tensor& out = g.data.at("out");
    const auto o = compare(
        a.out, tensor(static_cast<bf16*>(out.data), {g.tokens(), g.heads, g.model->d_v}),
        g.decode ? kDecodeOut : kPrefillOut,
        magnitudes_.size() == 0 ? Tensor{}
                                : tensor(magnitudes_.data(), {g.tokens(), g.heads, g.model->d_v}));
    const Tensor mine = tensor(static_cast<float*>(a.lse.data), {g.requests, g.s_q, g.heads});
    const Bar bar = g.decode ? kDecodeLse : kPrefillLse;
    const auto l = compare(mine, g.lse(), bar);
    v.ok = o.ok && l.ok;
    v.deviation = fmt::format("out {:.3f} of its bound (|Δ| {:.2g}, cosine {:.2g}), lse {:.3f}",
                              o.worst, o.largest, o.cosine, l.worst);
    if (g.data.has("max_logits")) {
      const auto m = compare(a.max_logit, g.data.at("max_logits"), bar);
      v.ok &= m.ok;
      v.deviation += fmt::format(", max logit {:.3f}", m.worst);
    }
    if (!o.ok) v.deviation += "; " + o.text(a.out);
    if (!l.ok) v.deviation += "; lse " + l.text(mine);
  }

  Golden golden_;
  std::string file_;
  Buffer<float> magnitudes_;  // [tokens, heads, d_v]
  std::vector<Verdict> verdicts_;
};

}  // namespace

std::vector<Verdict> check_golden(const std::string& path) {
  const SharedWithDevice shared;
  return Checks(path).run();
}

}  // namespace winnow::tools
