// `winnow run`, `winnow layer` and their ranks as users call them.
#include "cli.h"

#include "safetensors.h"

namespace winnow {
namespace {

TEST_F(Cli, RunChecksItself) {
  const std::string small = " --steps 3 --requests 3 --context 192 --step-tokens 20 --check";
  for (const char* model : {"v32 --heads 3", "v4 --heads 12 --page 16"}) {
    const json j = run_json("run --json --model " + std::string(model) + small);
    EXPECT_TRUE(j.at("ok").get<bool>());
    EXPECT_EQ(j.at("checked_steps"), 3);
    EXPECT_EQ(j.at("stages").size(), 6u);
    for (const json& s : j.at("stages")) {
      EXPECT_GT(s.at("calls"), 0) << s;
      EXPECT_EQ(s.at("compared") > 0, s.at("stage") != "plan") << s;
    }
  }
  const Output o = run("run --kernel reference --heads 1" + small);
  EXPECT_EQ(o.code, 0);
  expect_in(o.out, {"attend  reference", "largest deviation from the reference", "3 steps checked",
                    "keys/token: ", "of its bound: "});
  expect_in(o.err, {"step 3/3"});
}

// Over MPI ranks, where this build has the program for them; otherwise it says how to get it.
TEST_F(Cli, RunsOverRanks) {
  const std::string small = " --steps 3 --requests 3 --context 192 --step-tokens 20 --heads 4";
  const bool built =
      std::filesystem::exists(std::filesystem::path(WINNOW_PROGRAM).parent_path() / "winnow-ranks");
  if (!built) {
    const Output o = run("run --ranks 2" + small);
    EXPECT_EQ(o.code, 2);
    expect_in(o.err, {"winnow-ranks", "MPI", "configure"});
    GTEST_SKIP() << "built without MPI";
  }
  for (const char* spread : {"heads", "context", "queries", "sharded"}) {
    const json j = run_json("run --json --ranks 2 --spread " + std::string(spread) + small);
    EXPECT_TRUE(j.at("ok").get<bool>()) << j;
    EXPECT_EQ(j.at("ranks"), 2);
    EXPECT_GT(j.at("bytes_in_per_step"), 0) << j;
    if (j.at("spread") == "queries") {
      EXPECT_EQ(j.at("equal_to_one_rank"), 1) << j;
    }
  }
  const Output o = run("run --ranks 2 --spread queries" + small);
  EXPECT_EQ(o.code, 0) << o.err;
  expect_in(o.out, {"2 ranks over mpi", "bytes from other ranks",
                    "difference from one rank's outputs: 0.000 of its bound\n",
                    "above 1 is a failure", "one rank's bits: 100.000 %"});
  EXPECT_EQ(o.out.find("The others round"), std::string::npos) << o.out;
  const Output none = run("run --ranks 2" + small, "PATH=/nowhere");
  EXPECT_EQ(none.code, 2);
  expect_in(none.err, {"no mpirun in PATH", "install", "mpirun -n 2", "winnow-ranks run"});
  const Output uneven = run("run --ranks 3 --spread heads" + small);
  EXPECT_EQ(uneven.code, 2);
  EXPECT_EQ(uneven.err, "winnow: error: run: --heads: expected a multiple of --ranks 3, found 4\n");
  const Output v4 = run("run --ranks 2 --model v4" + small);
  EXPECT_EQ(v4.code, 2);
  expect_in(v4.err, {"--ranks", "v32"});
}

// `kill` reaches the program alone: it passes that on, so that no ranks are left behind.
TEST_F(Cli, RanksEndWithTheProgram) {
  if (!std::filesystem::exists(WINNOW_PROGRAM "-ranks")) GTEST_SKIP() << "built without MPI";
  const std::string log = path("log"), launcher = path("launcher");
  std::ofstream(launcher) << "#!/bin/sh\n[ \"$1\" = --version ] && exit\n"
                          << "trap 'echo ended >>\"" << log << "\"; exit' TERM\n"
                          << "echo began >>\"" << log << "\"\n"
                          << "for i in $(seq 400); do sleep 0.05; done\n";
  std::filesystem::permissions(launcher, std::filesystem::perms::owner_all);
  const auto wait_for = [&](const std::string& word) {
    return "for i in $(seq 200); do grep -sq " + word + " '" + log +
           "' && break; sleep 0.05; done; ";
  };
  const std::string command =
      "WINNOW_MPIRUN='" + launcher + "' '" WINNOW_PROGRAM "' run --ranks 2 " + ">'" + path("out") +
      "' 2>&1 & p=$!; " + wait_for("began") + "kill $p; " + wait_for("ended");
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(text_of(log), "began\nended\n");
}

// By hand, without a launcher: a group of one.
TEST_F(Cli, RanksNameBadWords) {
  const std::string program = WINNOW_PROGRAM "-ranks";
  if (!std::filesystem::exists(program)) GTEST_SKIP() << "built without MPI";
  const Output help = start(program, "--help");
  EXPECT_EQ(help.code, 0);
  expect_in(help.out, {"mpirun -n N winnow-ranks run", "step-tokens", "milliseconds"});
  const auto expect = [&](const std::string& arguments, const char* words) {
    const Output o = start(program, arguments);
    EXPECT_EQ(o.code, 2) << arguments;
    EXPECT_EQ(o.err, "winnow-ranks: error: " + std::string(words) + "\nSee winnow-ranks --help.\n");
  };
  expect("", "expected run or bench, found ''");
  expect("run --step 3", "unknown option '--step'");
  expect("run 3", "unknown option '3'");
  expect("run --steps", "--steps: expected a value");
  expect("run --heads 4x", "--heads: expected a whole number, found '4x'");
  expect("bench --steps 3", "unknown option '--steps'");
  // Sizes that no layer has would divide by zero, or count as others.
  expect("run --page 0", "--page: expected 1 to 65536, found 0");
  expect("run --steps 0", "--steps: expected 1 to 1099511627776, found 0");
  expect("run --requests -1", "--requests: expected 1 to 4096, found -1");
  expect("run --heads 4294967312", "--heads: expected 1 to 128, found 4294967312");
  expect("run --spread rows",
         "--spread: expected heads, context, queries or sharded, found 'rows'");
  expect("bench --milliseconds 0", "--milliseconds: expected 1 to 1048576, found 0");
}

TEST_F(Cli, BenchOverRanks) {
  expect_in(run("bench --help").out, {"parallel", "--ranks"});
  EXPECT_EQ(run("bench parallel attend").code, 2);
  if (!std::filesystem::exists(std::filesystem::path(WINNOW_PROGRAM).parent_path() /
                               "winnow-ranks"))
    GTEST_SKIP() << "built without MPI";
  const Output none = run("bench parallel --quick --ranks 1 --filter nothing");
  EXPECT_EQ(none.code, 2);
  expect_in(none.err, {"bench: no case of parallel matches"});
  const Output o = run("bench parallel --quick --ranks 1,2 --filter context_1x32k --json '" +
                       path("ranks.json") + "' --save '" + path("saved.json") + "'");
  ASSERT_EQ(o.code, 0) << o.err;
  expect_in(o.out, {"context_1x32k", "predicted", "Prediction only", "0.76 (57 %)"});
  const json rows = json::parse(text_of(path("ranks.json")));
  ASSERT_EQ(rows.size(), 2u);
  for (const json& r : rows)
    for (const char* field : {"case", "ranks", "measured_us", "predicted_us", "bytes_in"})
      EXPECT_TRUE(r.contains(field)) << field;
  EXPECT_EQ(rows[1].at("bytes_in"), 147712);  // 8 K and 128 heads / 2 of 2,052 B
  EXPECT_EQ(json::parse(text_of(path("saved.json"))).at("parallel"), rows);
  expect_in(text_of(path("saved.md")), {"| context_1x32k |", "Prediction only"});
}

// By default contexts are longer than what is kept of them: something is selected.
TEST_F(Cli, RunSelects) {
  for (const char* model : {"v32", "v4"}) {
    const json j =
        run_json("run --json --steps 1 --heads 1 --index-heads 1 --model " + std::string(model));
    EXPECT_GT(j.at("keys_scored").get<int64_t>(), 2 * j.at("keys_kept").get<int64_t>()) << j;
    EXPECT_GE(j.at("keys_attended"), j.at("keys_kept")) << j;
  }
}

// Sizes of a layer that takes no time; a head has its real size in all of them.
constexpr const char* kSmallLayer = " --hidden 128 --heads 4 --q-lora 64 --index-heads 4";

// Caches of a layer. A sanitizer, under which fp64 takes most of the time, sees no more in a
// second.
constexpr const char* kCaches[] = {
    "fp8",
#ifndef __SANITIZE_ADDRESS__
    "bf16",
#endif
};

TEST_F(Cli, LayersAreWithinTheirBoundsOfFp64) {
  const std::pair<const char*, const char*> layers[] = {
      {"v3.2", "full"},  {"glm-5", "shared"}, {"v4", "sliding"},
      {"v4-pro", "c4a"}, {"v4", "c128a"},     {"v4.1", "c2a"},
      {"v4.1", "c1a"},   {"v4.1", "reindex"}, {"v4.1", "reuse"}};
  for (const auto& [model, kind] : layers)
    for (const char* cache : kCaches) {
      const json j =
          run_json("layer --json --topk 20 --prompt 140 --chunk 96 --page 16 --model " +
                   std::string(model) + " --layer " + kind + " --cache " + cache + kSmallLayer);
      EXPECT_TRUE(j.at("ok").get<bool>()) << j;
      EXPECT_EQ(j.at("decode_steps"), 4);
      int compared = 0;
      for (const json& stage : j.at("decode")) {
        if (stage.at("compared") == 0) continue;
        ++compared;
        EXPECT_LT(stage.at("deviation"), stage.at("bound")) << stage;
        // Roundings show: a comparison of a thing with itself would not.
        EXPECT_GT(stage.at("deviation"), 1e-4) << stage;
      }
      EXPECT_GE(compared, 4) << model << " " << kind;
    }
  const Output o = run("layer --layer c4a --decode 0" + std::string(kSmallLayer));
  EXPECT_EQ(o.code, 0) << o.err;
  expect_in(o.out, {"v4-flash c4a", "compress", "output projections", "All within"});
  expect_in(run("layer --no-check --kernel simd" + std::string(kSmallLayer)).out, {"prefill"});
}

// Before the first entry closes there is nothing to choose from, and of a few keys all logits may
// be small beside their terms.
TEST_F(Cli, LayersOfAFewTokens) {
  const std::string few = " --requests 1 --decode 0" + std::string(kSmallLayer);
  for (const char* layer :
       {"v4 --layer c4a --prompt 1", "v4 --layer c128a --prompt 1", "v4.1 --layer c2a --prompt 1",
        "v4.1 --layer reindex --prompt 1", "v4.1 --layer c1a --prompt 2", "v3.2 --prompt 1",
        "v4 --layer c4a --prompt 4"})
    for (int seed = 1; seed <= 8; ++seed) {
      const Output o =
          run("layer --seed " + std::to_string(seed) + " --model " + std::string(layer) + few);
      EXPECT_EQ(o.code, 0) << layer << o.out << o.err;
    }
}

TEST_F(Cli, OptionsThatNeedOthers) {
  for (const auto& [call, needed] : {std::pair{"run --spread heads", "--ranks"},
                                     {"run --interleave 3", "--ranks"},
                                     {"layer --prefix layers.3.attn.", "--weights"}}) {
    const Output o = run(call);
    EXPECT_EQ(o.code, 2) << call;
    expect_in(o.err, {"requires", needed});
  }
}

TEST_F(Cli, LayerTakesACheckpointsWeights) {
  using Shape = std::initializer_list<int64_t>;
  std::vector<bf16> zeros(static_cast<size_t>(4 * 512 * 64), bf16{0x3c00});
  std::vector<float> ones(512, 1.0f);
  std::vector<e4m3> codes(static_cast<size_t>(4 * 512 * 64), e4m3{0x30});
  std::vector<std::pair<std::string, Tensor>> tensors;
  const auto add = [&](const char* name, Shape shape) {
    tensors.emplace_back(std::string("layers.0.attn.") + name, tensor(zeros.data(), shape));
  };
  add("wq_a.weight", {64, 128});
  add("wkv.weight", {512, 128});
  add("wo_a.weight", {8, 2048});
  add("wo_b.weight", {128, 8});
  add("q_norm.weight", {64});
  add("kv_norm.weight", {512});
  tensors.emplace_back("layers.0.attn.wq_b.weight", tensor(codes.data(), {2048, 64}));
  tensors.emplace_back("layers.0.attn.wq_b.scale", tensor(ones.data(), {16, 1}));
  const std::string call =
      "layer --layer sliding --prompt 20 --rank 8 --groups 1 --prefix "
      "layers.0.attn. --weights '" +
      path("layer.safetensors") + "'" + kSmallLayer;
  tools::write_safetensors(path("layer.safetensors"), tensors);
  const Output missing = run(call);
  EXPECT_EQ(missing.code, 2);
  expect_in(missing.err, {"--weights", "layers.0.attn.sinks", "attn_sink", "missing", "[4]"});
  tensors.emplace_back("layers.0.attn.attn_sink", tensor(ones.data(), {4}));
  tools::write_safetensors(path("layer.safetensors"), tensors);
  const Output whole = run(call + " --json");
  EXPECT_EQ(whole.code, 0) << whole.err;
  tensors[1].second = tensor(zeros.data(), {511, 128});
  tools::write_safetensors(path("layer.safetensors"), tensors);
  const Output wrong = run(call);
  EXPECT_EQ(wrong.code, 2);
  expect_in(wrong.err, {"layers.0.attn.wkv.weight", "expected [512, 128], found [511, 128]"});
  tensors[1].second = tensor(zeros.data(), {512, 128});
  tensors[7].second = tensor(ones.data(), {15, 1});
  tools::write_safetensors(path("layer.safetensors"), tensors);
  expect_in(run(call).err, {"wq_b.scale", "128 x 128", "[15, 1]"});
  tensors[7].second = tensor(zeros.data(), {16, 1});
  tools::write_safetensors(path("layer.safetensors"), tensors);
  EXPECT_EQ(run(call).code, 0);
  // Packed scales, and codes that a cast has made values of: neither is a number.
  const std::vector<int32_t> packed(16, 127);
  tensors[7].second = tensor(packed.data(), {16, 1});
  tools::write_safetensors(path("layer.safetensors"), tensors);
  expect_in(run(call).err, {"wq_b.scale", "expected f32, bf16 or ue8m0", "int32"});
  tensors[7].second = tensor(ones.data(), {16, 1});
  tensors[6].second = tensor(zeros.data(), {2048, 64});
  tools::write_safetensors(path("layer.safetensors"), tensors);
  expect_in(run(call).err, {"wq_b.weight: expected e4m3, since", "wq_b.scale is beside it"});
  // A shard holds experts too, whose codes of four bits have a dtype that winnow does not.
  tensors[6].second = tensor(codes.data(), {2048, 64});
  tensors.emplace_back("layers.0.ffn.experts.0.w1.weight",
                       tensor(reinterpret_cast<const uint8_t*>(codes.data()), {2048, 32}));
  tools::write_safetensors(path("layer.safetensors"), tensors);
  std::string shard = text_of(path("layer.safetensors"));
  shard.replace(shard.find("\"U8\""), 4, "\"I8\"");
  std::ofstream(path("layer.safetensors"), std::ios::binary) << shard;
  const Output beside = run(call + " --json");
  EXPECT_EQ(beside.code, 0) << beside.err;
  const Output kind = run("layer --model v3.2 --layer c4a");
  EXPECT_EQ(kind.code, 2);
  expect_in(kind.err, {"--layer", "v3.2 has full", "c4a"});
}

// One layer with its real sizes; schedules by name.
TEST_F(Cli, RunTakesRealModels) {
  const json j = run_json(
      "run --json --model v4-flash --layers 1 --steps 2 --requests 1 --context 24 --step-tokens 4 "
      "--check");
  EXPECT_TRUE(j.at("ok").get<bool>());
  EXPECT_EQ(j.at("checked_steps"), 2);
  EXPECT_EQ(j.at("layers").size(), 1u);
  EXPECT_EQ(j.at("layers")[0].at("kind"), "sliding");
  const Output heads = run("run --model v4-flash --heads 3");
  EXPECT_EQ(heads.code, 2);
  expect_in(heads.err, {"--heads", "v4-flash"});
  EXPECT_EQ(run("run --model v4 --layers 3").code, 2);
  const Output layers = run("run --model v4-flash --layers 99");
  EXPECT_EQ(layers.code, 2);
  expect_in(layers.err, {"--layers", "at most the 43 of v4-flash, found 99"});
}

}  // namespace
}  // namespace winnow
