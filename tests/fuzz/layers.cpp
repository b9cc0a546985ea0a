// The steps in front of the stages. norm and rotate: within the rounding of the reference. What is
// made of them: bit for bit what the same kernel's steps give one after the other.
#include <set>

#include "compress/compress_problem.h"
#include "target.h"
#include "winnow/norm_write.h"
#include "winnow/prepare_queries.h"

namespace winnow::testing {
namespace {

constexpr int64_t kPositions = 12;
constexpr double kUlp = 0x1p-24;  // of fp32

// Whether there are kernels to compare, of the steps as well: a CUDA build may leave some to the
// CPU.
bool runs(const std::string& stage) {
  if (compared == Compared::kCpu) return true;
  std::set<std::string> on_device;
  for (const KernelInfo& k : support())
    if (k.device == "cuda") on_device.insert(k.stage);
  return on_device.contains(stage) && on_device.contains("norm") && on_device.contains("rotate");
}

Guarded<float> floats(Source& s, int64_t count, float mean) {
  Guarded<float> values(count);
  for (float& x : values) x = mean + s.normal();
  return values;
}

// A norm of rows of `width` and a RoPE, with their memory.
struct Steps {
  Guarded<float> weight, bias, angles;
  Norm norm;
  Rope rope;

  Steps(Source& s, int64_t width)
      : weight(floats(s, width, 1)), bias(floats(s, width, 0)), angles(kPositions * 64) {
    constexpr NormKind kinds[] = {NormKind::kNone, NormKind::kRms, NormKind::kLayer};
    norm.kind = kinds[draw(s, 0, 2)];
    norm.eps = chance(s, 80) ? 1e-6f : 1e-20f;
    if (chance(s, 70)) norm.weight = tensor(weight.data(), {width});
    if (chance(s, 40)) norm.bias = tensor(bias.data(), {width});
    const bool paired = chance(s, 30);
    rope.table = paired ? tensor(angles.data(), {kPositions, 2, 32}, {64, 1, 2})
                        : tensor(angles.data(), {kPositions, 2, 32});
    rope_table({.table = rope.table});
    rope.table.shape[0] = chance(s, 90) ? kPositions : draw(s, 0, kPositions);
    rope.pairs = chance(s, 50) ? RopePairs::kHalf : RopePairs::kInterleaved;
    rope.slice = chance(s, 50) ? RopeSlice::kFirst : RopeSlice::kLast;
    rope.inverse = chance(s, 25);
  }
};

// A row of norm() against the reference's, which sums in double. fp32 is off by `width` roundings
// of a sum and a few more, the mean by as many of the mean magnitude; then bf16, 2^-8, twice.
void expect_norm(const Norm& n, const bf16* x, const bf16* got, const bf16* want, int64_t width) {
  double sum = 0, magnitudes = 0, squares = 0;
  const double count = static_cast<double>(width);
  for (int64_t i = 0; i < width; ++i) {
    sum += to_float(x[i]);
    magnitudes += std::fabs(to_float(x[i]));
  }
  const double mean = n.kind == NormKind::kLayer ? sum / count : 0;
  for (int64_t i = 0; i < width; ++i) squares += std::pow(to_float(x[i]) - mean, 2);
  const double inverse = 1 / std::sqrt(squares / count + n.eps);
  const double off = n.kind == NormKind::kLayer ? (count + 2) * kUlp * magnitudes / count : 0;
  for (int64_t i = 0; i < width; ++i) {
    const double w = n.weight.data ? std::fabs(static_cast<float*>(n.weight.data)[i]) : 1;
    const double scaled = std::fabs(to_float(x[i]) - mean) * inverse * w;
    const double result = std::fabs(to_float(want[i]));
    const double fp32 = scaled * (count + 8) * kUlp + 2 * off * inverse * w + result * kUlp;
    ASSERT_LE(std::fabs(to_float(got[i]) - to_float(want[i])),
              2 * (fp32 + (result + fp32) * 0x1p-8) + 0x1p-133)
        << "value " << i << " of " << width;
  }
}

void norm_any(Source& s) {
  const int64_t T = draw(s, 0, 4), stride_more = draw(s, 0, 3);
  const int64_t width = chance(s, 80) ? draw(s, 1, 70) : draw(s, 1, 600),
                stride = width + stride_more;
  Steps steps(s, width);
  if (steps.norm.kind == NormKind::kNone) steps.norm.kind = NormKind::kRms;
  const Guarded<bf16> x = normals(s, T * stride, std::ldexp(1.0f, draw32(s, -20, 20)));
  std::vector<bf16> want;
  for (const Candidate& kernel : candidates("norm")) {
    Guarded<bf16> out(T * stride);
    NormArgs a{.target = kernel.target()};
    a.rows[0] = {.x = tensor(x.data(), {T, width}, {stride, 1}),
                 .out = tensor(out.data(), {T, width}, {stride, 1}),
                 .norm = steps.norm};
    norm(a);
    finish(kernel);
    if (want.empty()) want = out.values();
    for (int64_t t = 0; t < T; ++t)
      expect_norm(steps.norm, x.data() + t * stride, &out[t * stride], &want[t * stride], width);
  }
}

void rotate_any(Source& s) {
  const int64_t T = draw(s, 0, 4), H = draw(s, 0, 3), width = 64 + draw(s, 0, 70);
  const Steps steps(s, 1);
  auto positions = indices(s, T, kPositions, 20);
  const Guarded<bf16> x = normals(s, T * H * width);
  std::vector<bf16> want;
  for (const Candidate& kernel : candidates("rotate")) {
    Guarded<bf16> out(T * H * width);
    rotate({.x = tensor(x.data(), {T, H, width}),
            .positions = tensor(positions.data(), {T}),
            .rope = steps.rope,
            .out = tensor(out.data(), {T, H, width}),
            .target = kernel.target()});
    finish(kernel);
    if (want.empty()) want = out.values();
    // Two products of values below 4 and a sum in fp32, then bf16, 2^-8: twice.
    for (size_t i = 0; i < want.size(); ++i) {
      if (out[i].bits == want[i].bits) continue;
      ASSERT_LE(std::fabs(to_float(out[i]) - to_float(want[i])),
                2 * (8 * 0x1p-23 + std::fabs(to_float(want[i])) * 0x1p-8))
          << kernel.name << ", value " << i;
    }
  }
}

// A copy of the rows through norm() and rotate() of a kernel; tokens outside the table stay.
Guarded<bf16> through_steps(const Steps& steps, const Guarded<bf16>& x, const Tensor& shape,
                            int64_t normed, const Tensor& positions, const Target& target) {
  Guarded<bf16> rows(x);
  const int64_t T = shape.shape[0], H = shape.shape[1], width = shape.shape[2];
  if (steps.norm.kind != NormKind::kNone) {
    const Tensor view = tensor(rows.data(), {T * H, normed}, {width, 1});
    norm({.rows = {{.x = view, .out = view, .norm = steps.norm}}, .target = target});
  }
  const Tensor heads = tensor(rows.data(), {T, H, width});
  rotate({.x = heads, .positions = positions, .rope = steps.rope, .out = heads, .target = target});
  return rows;
}

bool inside(const Steps& steps, int32_t position) {
  return position >= 0 && position < steps.rope.table.shape[0];
}

void prepare_any(Source& s) {
  const int64_t T = draw(s, 0, 4), H = draw(s, 0, 3), width = 64 + draw(s, 0, 70);
  const Steps steps(s, width);
  auto positions = indices(s, T, kPositions, 20);
  const Guarded<bf16> q = normals(s, T * H * width);
  for (const Candidate& kernel : candidates("prepare_query")) {
    Guarded<bf16> out(T * H * width);
    const PrepareQueryArgs a{.q = tensor(q.data(), {T, H, width}),
                             .norm = steps.norm,
                             .positions = tensor(positions.data(), {T}),
                             .rope = steps.rope,
                             .out = tensor(out.data(), {T, H, width}),
                             .target = kernel.target()};
    prepare_query(a);
    Guarded<bf16> want = through_steps(steps, q, a.q, width, a.positions, a.target);
    finish(kernel);
    for (int64_t t = 0; t < T; ++t)
      if (!inside(steps, positions[t]))
        std::memset(want.data() + t * H * width, Guarded<bf16>::kPoison, H * width * sizeof(bf16));
    expect_same(out, want.values(), "prepare_query: " + kernel.name);
  }
}

// Codes and scales that write() gives index keys of these rows.
Guarded<std::byte> as_keys(Guarded<bf16>& rows, ScaleMode scale, const Target& target) {
  const auto count = static_cast<int64_t>(rows.size()) / 128;
  Guarded<int64_t> slots(count);
  for (int64_t i = 0; i < count; ++i) slots[i] = i;
  Guarded<std::byte> keys(count * 132);  // pages of one key: 128 codes, a scale
  write({.kv = tensor(rows.data(), {count, 128}),
         .slots = tensor(slots.data(), {count}),
         .cache = {keys.data(), CacheFormat::kIndexKeys, std::max<int64_t>(count, 1), 1},
         .scale = scale,
         .target = target});
  return keys;
}

void index_any(Source& s) {
  const int64_t T = draw(s, 1, 3), H = draw(s, 1, 3), rows = T * H;
  const Steps steps(s, 1);
  auto positions = indices(s, T, kPositions, 20);
  const Guarded<bf16> q = normals(s, rows * 128, std::ldexp(1.0f, draw32(s, -16, 8)));
  const Guarded<float> weights = floats(s, rows, 0);
  const ScaleMode scale = chance(s, 50) ? ScaleMode::kPow2 : ScaleMode::kAmax;
  for (const Candidate& kernel : candidates("index_query")) {
    Guarded<bf16> whole(rows * 128, 0);
    Guarded<e4m3> codes(rows * 128);
    Guarded<float> out_weights(rows), ignored(rows);
    IndexQueryArgs a{.q = tensor(q.data(), {T, H, 128}),
                     .weights = tensor(weights.data(), {T, H}),
                     .positions = tensor(positions.data(), {T}),
                     .rope = steps.rope,
                     .hadamard = chance(s, 30),
                     .scale = scale,
                     .factor = 0.25f,
                     .out = tensor(whole.data(), {T, H, 128}),
                     .out_weights = tensor(ignored.data(), {T, H}),
                     .target = kernel.target()};
    IndexQueryArgs in_bf16 = a;
    in_bf16.scale = ScaleMode::kDefault;
    index_query(in_bf16);
    a.out = tensor(codes.data(), {T, H, 128});
    a.out_weights = tensor(out_weights.data(), {T, H});
    index_query(a);
    Steps alone = steps;
    alone.norm.kind = NormKind::kNone;
    const Guarded<bf16> rotated = through_steps(alone, q, a.q, 128, a.positions, a.target);
    const Guarded<std::byte> keys = as_keys(whole, scale, kernel.target());
    finish(kernel);
    for (int64_t i = 0; i < rows; ++i) {
      const bool there = inside(steps, positions[i / H]);
      const std::byte* key = keys.data() + i * 132;
      float factor = 0;
      std::memcpy(&factor, key + 128, 4);
      factor = weights[i] * factor * a.factor;
      const uint8_t* code = &codes[i * 128].bits;
      EXPECT_EQ(std::memcmp(code, key, 128) == 0, there) << kernel.name << ", codes of row " << i;
      EXPECT_EQ(out_weights[i] == factor, there) << kernel.name << ", weight of row " << i;
      if (there && !a.hadamard) {
        EXPECT_EQ(std::memcmp(&whole[i * 128], &rotated[i * 128], 256), 0) << kernel.name << i;
      }
    }
  }
}

void prologue_any(Source& s) {
  constexpr CacheFormat formats[] = {CacheFormat::kIndexKeys, CacheFormat::kIndexKeysBf16,
                                     CacheFormat::kV32Fp8,    CacheFormat::kV32Bf16,
                                     CacheFormat::kV4Fp8,     CacheFormat::kV4Bf16};
  const CacheFormat format = formats[chance(s, 60) ? draw(s, 0, 1) : draw(s, 2, 5)];
  const int64_t T = draw(s, 0, 4), width = record_dim(format), normed = width == 576 ? 512 : width;
  Steps steps(s, normed);
  if (width != kIndexDim) steps.rope.slice = RopeSlice::kLast;
  auto positions = indices(s, T, kPositions, 20);
  Guarded<bf16> kv = normals(s, T * width);
  Guarded<int64_t> slots(T);
  for (int64_t t = 0; t < T; ++t) slots[t] = chance(s, 10) ? -1 : t;
  for (const Candidate& kernel : candidates("write")) {
    Guarded<std::byte> got(2 * page_bytes(format, 2)), want(2 * page_bytes(format, 2));
    WriteArgs a{.kv = tensor(kv.data(), {T, width}),
                .slots = tensor(slots.data(), {T}),
                .cache = {got.data(), format, 2, 2},
                .target = kernel.target()};
    WriteArgs plain = a;
    a.prologue = {
        .norm = steps.norm, .rope = steps.rope, .positions = tensor(positions.data(), {T})};
    write(a);
    Guarded<bf16> rows = through_steps(steps, kv, tensor(kv.data(), {T, 1, width}), normed,
                                       a.prologue.positions, a.target);
    finish(kernel);
    Guarded<int64_t> kept(slots);
    for (int64_t t = 0; t < T; ++t)
      if (!inside(steps, positions[t])) kept[t] = -1;
    plain.kv.data = rows.data();
    plain.slots.data = kept.data();
    plain.cache.data = want.data();
    write(plain);
    finish(kernel);
    expect_same(got, want.values(), "write with a prologue: " + kernel.name);
  }
}

// Two queries in one call: the bits of the two calls.
void queries_any(Source& s) {
  const int64_t T = draw(s, 0, 3), H = draw(s, 1, 3), width = 64 + draw(s, 0, 70);
  const Steps steps(s, width);
  auto positions = indices(s, T, kPositions, 20);
  const Guarded<bf16> q = normals(s, T * H * width), index_q = normals(s, T * H * 128);
  const Guarded<float> weights = floats(s, T * H, 0);
  const bool with_query = chance(s, 80);
  for (const Candidate& kernel : candidates("prepare_queries")) {
    Guarded<bf16> out(T * H * width), want(T * H * width);
    Guarded<e4m3> codes(T * H * 128), want_codes(T * H * 128);
    Guarded<float> scaled(T * H), want_scaled(T * H);
    PrepareQueryArgs query{.q = tensor(q.data(), {T, H, width}),
                           .norm = steps.norm,
                           .positions = tensor(positions.data(), {T}),
                           .rope = steps.rope,
                           .out = tensor(want.data(), {T, H, width}),
                           .target = kernel.target()};
    IndexQueryArgs index{.q = tensor(index_q.data(), {T, H, 128}),
                         .weights = tensor(weights.data(), {T, H}),
                         .positions = query.positions,
                         .rope = steps.rope,
                         .out = tensor(want_codes.data(), {T, H, 128}),
                         .out_weights = tensor(want_scaled.data(), {T, H}),
                         .target = kernel.target()};
    if (with_query) prepare_query(query);
    index_query(index);
    query.out.data = out.data();
    index.out.data = codes.data();
    index.out_weights.data = scaled.data();
    if (!with_query) query = {};
    prepare_queries({.query = query, .index = index, .target = kernel.target()});
    finish(kernel);
    expect_same(out, want.values(), "prepare_queries, query: " + kernel.name);
    expect_same(codes, want_codes.values(), "prepare_queries, codes: " + kernel.name);
    expect_same(scaled, want_scaled.values(), "prepare_queries, weights: " + kernel.name);
  }
}

// Norms and writes in one call: the bits of the calls.
void norm_write_any(Source& s) {
  const int64_t T = draw(s, 0, 4), width = draw(s, 1, 70);
  Steps rows(s, width), keys(s, kIndexDim);
  if (rows.norm.kind == NormKind::kNone) rows.norm.kind = NormKind::kRms;
  auto positions = indices(s, T, kPositions, 20);
  const Guarded<bf16> x = normals(s, T * width), k = normals(s, T * kIndexDim);
  Guarded<int64_t> slots(T);
  for (int64_t t = 0; t < T; ++t) slots[t] = chance(s, 10) ? -1 : t;
  const bool normed = chance(s, 80);
  constexpr CacheFormat kFormat = CacheFormat::kIndexKeys;
  for (const Candidate& kernel : candidates("norm_write")) {
    Guarded<bf16> out(T * width), want(T * width);
    Guarded<std::byte> cache(2 * page_bytes(kFormat, 2)), want_cache(2 * page_bytes(kFormat, 2));
    NormArgs first{.target = kernel.target()};
    first.rows[0] = {tensor(x.data(), {T, width}), tensor(want.data(), {T, width}), rows.norm};
    WriteArgs second{.kv = tensor(k.data(), {T, kIndexDim}),
                     .slots = tensor(slots.data(), {T}),
                     .cache = {want_cache.data(), kFormat, 2, 2},
                     .target = kernel.target()};
    second.prologue = {
        .norm = keys.norm, .rope = keys.rope, .positions = tensor(positions.data(), {T})};
    if (normed) norm(first);
    write(second);
    first.rows[0].out.data = out.data();
    second.cache.data = cache.data();
    if (!normed) first = NormArgs();
    NormWriteArgs a{.norm = first, .target = kernel.target()};
    a.write[draw(s, 0, 1)] = second;
    norm_write(a);
    finish(kernel);
    expect_same(out, want.values(), "norm_write, rows: " + kernel.name);
    expect_same(cache, want_cache.values(), "norm_write, cache: " + kernel.name);
  }
}

// One call for the whole streams, and any cutting of them with hostile tokens between.
void compress_any(Source& s) {
  namespace c = internal::compress;
  constexpr CacheFormat formats[] = {CacheFormat::kIndexKeys, CacheFormat::kIndexKeysBf16,
                                     CacheFormat::kV4Bf16};
  c::Case of{"", formats[chance(s, 85) ? draw(s, 0, 1) : 2], draw32(s, 1, 5)};
  of.gate = of.ratio > 1 || chance(s, 50);
  of.overlap = of.gate && chance(s, 50);
  of.bias = of.gate && chance(s, 50);
  of.block = draw32(s, 1, 5);
  of.bf16_rows = chance(s, 40);
  of.hadamard = of.width() == kIndexDim && chance(s, 40);
  for (int64_t n = draw(s, 1, 2); n > 0; --n) of.lengths.push_back(draw32(s, 1, 9));
  c::Problem p(of, s());
  const c::StateKind kind = chance(s, 50) ? c::StateKind::kRing : c::StateKind::kPaged;
  for (const Candidate& kernel : candidates("compress")) {
    const auto run = [&](c::Memory& m, const std::vector<c::Token>& tokens) {
      c::Step step(p, m, tokens);
      step.args.target = kernel.target();
      compress(step.args);
      finish(kernel);
    };
    c::Memory whole(p, kind), cut(p, kind);
    run(whole, p.whole());
    const auto requests = static_cast<int32_t>(of.lengths.size());
    std::vector<int32_t> done(of.lengths.size(), 0);
    for (bool all = false; !all;) {
      std::vector<c::Token> tokens;
      all = true;
      for (int32_t r = 0; r < requests; ++r) {
        for (int64_t n = draw(s, 1, 4); n > 0 && done[r] < of.lengths[r]; --n)
          tokens.push_back({r, done[r]++});
        all = all && done[r] == of.lengths[r];
        if (chance(s, 20)) tokens.push_back({0, draw32(s, -3, -1)});
        if (of.gate && chance(s, 20)) tokens.push_back({index_for(s, requests, 100), 0});
      }
      run(cut, tokens);
    }
    expect_same(cut.cache, whole.cache.values(), "compress: " + kernel.name);
  }
}

// Any numbers: an Error, or a table of cosines and sines.
void table_any(Source& s) {
  constexpr double values[] = {10000, 160000, 1, 0, -1, 40, 1e-300, 1e300, INFINITY, NAN};
  const auto any = [&](double usual) { return chance(s, 60) ? usual : values[draw(s, 0, 9)]; };
  Guarded<float> table(kPositions * 64);
  RopeTableArgs a{.theta = any(10000),
                  .factor = any(4),
                  .original = chance(s, 70) ? 4096 : draw(s, INT64_MIN, INT64_MAX),
                  .beta_fast = any(32),
                  .beta_slow = any(1),
                  .table = tensor(table.data(), {kPositions, 2, 32})};
  try {
    rope_table(a);
  } catch (const Error&) {
    return;
  }
  for (const float x : table) EXPECT_LE(std::fabs(x), 1) << a.theta << " " << a.factor;
}

void run(Source& s) {
  constexpr struct {
    const char* stage;
    void (*problem)(Source&);
  } all[] = {{"norm", norm_any},
             {"rotate", rotate_any},
             {"prepare_query", prepare_any},
             {"index_query", index_any},
             {"prepare_queries", queries_any},
             {"write", prologue_any},
             {"norm_write", norm_write_any},
             {"compress", compress_any},
             {"rope_table", table_any}};
  const auto& one = all[draw(s, 0, std::ssize(all) - 1)];
  if (runs(one.stage)) one.problem(s);
}

const FuzzTarget layers_target{"layers", 10, run};

}  // namespace
}  // namespace winnow::testing
