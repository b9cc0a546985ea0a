// The program as its users call it: exit status, key lines, and JSON that programs can read.
#include "cli.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <sstream>

#include "safetensors.h"

namespace winnow {
namespace {

const std::string kGolden = std::string(WINNOW_TEST_DATA) + "/golden";

TEST_F(Cli, HelpAndVersion) {
  EXPECT_EQ(run("--version").out, "winnow " + std::string(version()) + "\n");
  const Output help = run("--help");
  EXPECT_EQ(help.code, 0);
  for (const char* command :
       {"run",   "layer",  "soak",          "verify",          "bench",      "support",
        "norm",  "rotate", "prepare_query", "index_query",     "compress",   "write",
        "plan",  "score",  "select",        "locate",          "attend",     "mha",
        "merge", "mask",   "lists",         "prepare_queries", "norm_write", "absorb"}) {
    expect_in(help.out, {command});
    const Output o = run(std::string(command) + " --help");
    EXPECT_EQ(o.code, 0) << command;
    const size_t examples = o.out.find("Examples:");
    ASSERT_NE(examples, std::string::npos) << command;
    expect_in(o.out, {("Usage: winnow " + std::string(command) + " ").c_str()});
    // An example names no option that the command does not have.
    const std::string options = o.out.substr(0, examples);
    std::istringstream words(o.out.substr(examples));
    for (std::string word; words >> word;) {
      if (!word.starts_with("--")) continue;
      EXPECT_NE(options.find("  " + word + " "), std::string::npos) << command << " " << word;
    }
  }
}

TEST_F(Cli, BadUsageIsNamed) {
  const auto expect = [&](const std::string& arguments, std::initializer_list<const char*> words) {
    const Output o = run(arguments);
    EXPECT_EQ(o.code, 2) << arguments;
    expect_in(o.err, {"winnow: error: "});
    expect_in(o.err, words);
  };
  expect("", {"subcommand"});
  expect("atend", {"unknown command 'atend'", "attend", "verify"});
  expect("run --model v5", {"--model", "v5", "v32", "v4"});
  expect("run --heads 129", {"--heads", "129"});
  expect("run --kernel nope", {"run: --kernel: expected a kernel of some stage, found nope"});
  expect("run --ranks 2 --kernel nope", {"run: --kernel: expected a kernel of some stage"});
  expect("write --format v4", {"--format", "v4_fp8", "index_keys"});
  expect("attend --kernel nope", {"attend", "unknown kernel 'nope'", "simd", "reference"});
  expect("norm --kernel nope", {"norm", "unknown kernel 'nope'; norm has:", "simd, reference"});
  expect("attend --extra 5", {"--extra"});
  expect("bench nothing", {"nothing", "attend", "write"});
  expect("bench --set nothing", {"nothing", "default"});
  expect("bench locate --filter nothing", {"no case of set 'default' on --device cpu"});
  expect("bench mask", {"no case of set 'default' on --device cpu"});  // timed on devices alone
  expect("bench locate --kernel nope", {"unknown kernel 'nope'", "locate has: simd, reference"});
  expect("bench plan --kernel simd", {"unknown kernel 'simd'", "plan has: none"});
  expect("bench locate select --kernel nope", {"unknown kernel 'nope'", "locate=simd"});
  expect("plan --query-lens 4 --seq-lens 2", {"plan", "seq_lens"});
  expect("plan --model v4 --mha", {"plan", "mha"});
  expect("plan --threshold ''", {"--threshold", "not in range"});
  expect("plan --workspace-rows -1", {"--workspace-rows", "-1 not in range"});
  expect("plan --workspace-rows 99999999999999999999",
         {"--workspace-rows", "99999999999999999999"});
  expect("plan --split-size 0", {"--split-size", "0 not in range"});
  expect("verify", {"path", "See winnow verify --help."});
  expect("norm --page 7", {"not expected: --page 7\nSee winnow norm --help."});
  expect("absorb --context 7", {"--context", "not expected"});
  expect("run --steps 1 --seed -1", {"--seed", "expected 0 or more, found -1"});
  expect("attend --seed -1", {"--seed", "-1"});
  expect("attend --seed ''", {"--seed", "expected 0 or more, found ''"});
  expect("soak --steps 8 --seed -1", {"--seed", "expected 0 or more, found -1"});
  expect("write --seed 18446744073709551616", {"--seed", "64 bits, found 18446744073709551616"});
  expect("run --context 16777216 --requests 4096",
         {"--context: expected at most 2147483647", "--requests", "68719476736"});
  expect("bench locate --after code", {"after", "CUDA"});
#ifndef WINNOW_WITH_CUDA
  expect("bench locate --device cuda", {"bench: --device cuda: this build has no kernels for it"});
#endif
  expect("bench --runs 0", {"--runs", "not in range"});
  expect("bench locate --seconds nan", {"--seconds", "expected a number, found nan"});
  for (const char* option : {"--json", "--save", "--render"})
    expect(std::string("bench locate --quick ") + option + " ''", {option, "a file's name"});
  expect("bench locate --ranks 2", {"--ranks", "parallel"});
  expect("bench parallel --cache cold", {"--cache", "parallel"});
  expect("run --layers 3", {"--layers", "v4-flash", "found v32"});
  expect("run --model v4-flash --heads 8", {"--heads", "v32 and v4", "found v4-flash"});
  expect("layer --model v32 --groups 7", {"--groups", "v3.2 has none"});
  expect("locate --repeat 0", {"--repeat", "not in range"});
  for (const char* verb : {"attend", "score", "select", "locate", "write"})
    expect(std::string(verb) + " --batch 1048576 --s-q 1048576", {"--batch", "--s-q", "tokens"});
}

// What is empty between two commas is no number, and is not passed over.
TEST_F(Cli, ListsOfNumbersAreWhole) {
  const auto refuse = [&](const std::string& arguments, const char* option, const char* found) {
    const Output o = run(arguments);
    EXPECT_EQ(o.code, 2) << arguments << o.out;
    expect_in(o.err, {option, ": expected numbers from ", found});
  };
  for (const char* list : {"1,,2", ",1", "1,", "''", "'[1,,2]'"})
    refuse(std::string("plan --query-lens ") + list, "--query-lens", "found '");
  refuse("plan --query-lens 1,1 --seq-lens 5,,6", "--seq-lens", "found ''");
  refuse("bench parallel --ranks 1,,2", "--ranks", "found ''");
  refuse("bench parallel --ranks 1,1025", "--ranks", "found '1025'");
  refuse("plan --query-lens 1,-1", "--query-lens", "found '-1'");
  refuse("plan --query-lens 1,2.5", "--query-lens", "found '2.5'");
  refuse("plan --query-lens 1,99999999999", "--query-lens", "found '99999999999'");
  std::string many = "1048576", short_contexts = "1";
  for (int i = 0; i < 2047; ++i) {
    many += ",1048576";
    short_contexts += ",1";
  }
  const Output sum = run("plan --query-lens " + many + " --seq-lens " + short_contexts);
  EXPECT_EQ(sum.code, 2);
  expect_in(sum.err, {"--query-lens: 2147483648 tokens, more than 2147483647"});
  EXPECT_EQ(run_json("plan --json --query-lens 1,0,2").at("tokens"), 3);
  EXPECT_EQ(run_json("plan --json --query-lens 7").at("requests"), 1);
  expect_in(run("plan --help").out, {"--query-lens INT,... in [0 - 1048576]=1,1,1,1,200,300"});
}

// Once, as bad usage: not as a kernel's failure for every check, and not by every rank.
TEST_F(Cli, AMisspeltKernelOfTheEnvironmentIsNamed) {
  for (const std::string& command :
       {"verify '" + kGolden + "'", std::string("run --steps 1"), std::string("run --ranks 2"),
        std::string("attend --kernel reference"), std::string("bench parallel --ranks 1")}) {
    const Output o = run(command, "WINNOW_KERNEL=refrence");
    EXPECT_EQ(o.code, 2) << command << o.out;
    EXPECT_EQ(o.err,
              "winnow: error: WINNOW_KERNEL: expected kernel or stage=kernel, as `winnow "
              "support` lists them, found 'refrence'\n")
        << command;
  }
  EXPECT_EQ(run("support", "WINNOW_KERNEL=refrence").code, 0);
}

TEST_F(Cli, SupportListsEveryStage) {
  const json j = run_json("support --json");
  EXPECT_EQ(j.at("version"), version());
  std::set<std::string> stages;
  for (const json& k : j.at("kernels")) {
    stages.insert(k.at("stage").get<std::string>());
    EXPECT_EQ(k.at("available").get<bool>(), k.at("reason").is_null());
  }
  for (const char* stage :
       {"norm", "rope_table", "rotate", "prepare_query", "index_query", "prepare_queries",
        "norm_write", "compress", "write", "score", "select", "locate", "attend"})
    EXPECT_TRUE(stages.count(stage)) << stage;
  expect_in(run("support").out, {"attend", "reference", "available"});
  expect_in(run("support --markdown").out, {"| stage |", "| attend |"});
}

TEST_F(Cli, VerifyGolden) {
  const Output o = run("verify '" + kGolden + "/decode_v32_h128.safetensors' '" + kGolden +
                       "/prefill_v4_h64_sink_len.safetensors'");
  EXPECT_EQ(o.code, 0) << o.out;
  const size_t line = o.out.rfind('\n', o.out.size() - 2) + 1;
  const std::string closing = o.out.substr(line);
  EXPECT_TRUE(closing.ends_with(" passed, 0 failed\n")) << closing;
  EXPECT_GE(std::stoi(closing), 14);
  expect_in(o.out, {"decode_v32_h128", "prefill_v4_h64_sink_len", "write", "locate", "attend"});
}

TEST_F(Cli, VerifyFailsOnAWrongResult) {
  auto golden = tools::Safetensors::read(kGolden + "/decode_v32_h64_mtp_sink.safetensors");
  static_cast<uint16_t*>(golden.at("out").data)[12345] ^= 0x80;  // one value, twice as large
  std::vector<std::pair<std::string, Tensor>> tensors(golden.tensors().begin(),
                                                      golden.tensors().end());
  tools::write_safetensors(path("bent.safetensors"), tensors, golden.metadata());
  const Output o = run("verify '" + path("bent.safetensors") + "'");
  EXPECT_EQ(o.code, 1) << o.out;
  expect_in(o.out, {"FAIL  bent", "[0, 24, 57]", "1 of 196608 outside"});
  EXPECT_EQ(o.out.find(", 0 failed"), std::string::npos);
}

// A stored length counts for all query tokens of its request.
TEST_F(Cli, VerifyTakesLengthsOfSeveralQueryTokens) {
  auto golden = tools::Safetensors::read(kGolden + "/decode_v32_h64_mtp_sink.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors(golden.tensors().begin(),
                                                      golden.tensors().end());
  const Tensor& indices = golden.at("indices_physical");
  ASSERT_GT(indices.shape[1], 1);
  std::vector<int32_t> lengths(indices.shape[0], static_cast<int32_t>(indices.shape[2]));
  tensors.push_back({"topk_length", tensor(lengths.data(), {indices.shape[0]})});
  tools::write_safetensors(path("whole.safetensors"), tensors, golden.metadata());
  const Output whole = run("verify '" + path("whole.safetensors") + "'");
  EXPECT_EQ(whole.code, 0) << whole.out << whole.err;
  lengths[0] = 1;
  tools::write_safetensors(path("short.safetensors"), tensors, golden.metadata());
  EXPECT_EQ(run("verify '" + path("short.safetensors") + "'").code, 1);
}

TEST_F(Cli, VerifyJsonOfAnyFileName) {
  const std::string file = path("na\xffme.safetensors");
  std::filesystem::copy_file(kGolden + "/prefill_v32_h64.safetensors", file);
  const Output o = run("verify --json '" + file + "'");
  EXPECT_EQ(o.code, 0) << o.err;
  const json j = json::parse(o.out);
  EXPECT_EQ(j.at("failed"), 0);
  EXPECT_EQ(j.at("checks")[0].at("file"), "na\xef\xbf\xbdme");  // U+FFFD for what is no UTF-8
}

TEST_F(Cli, VerifyUnreadableInput) {
  EXPECT_EQ(run("verify /nowhere").code, 2);
  EXPECT_EQ(run("verify '" + path(".") + "'").code, 2);  // a folder without vectors
  std::filesystem::copy_file(kGolden + "/decode_v32_h128.safetensors", path("cut.safetensors"));
  std::filesystem::resize_file(path("cut.safetensors"), 100000);
  const Output o = run("verify '" + path("cut.safetensors") + "'");
  EXPECT_EQ(o.code, 2);
  expect_in(o.err, {"winnow: error: safetensors: ", "cut.safetensors", "data_offsets"});
  EXPECT_EQ(o.err.find("cut.safetensors"), o.err.rfind("cut.safetensors")) << o.err;
  expect_in(o.out, {"0 passed, 0 failed"});
}

// Shapes that a file's other tensors contradict would be read beyond their end.
TEST_F(Cli, VerifyRefusesWrongShapes) {
  for (const auto& [file, name] : {std::pair{"decode_v32_h64_mtp_sink", "lse"},
                                   {"decode_v32_h64_mtp_sink", "out"},
                                   {"decode_v32_h64_mtp_sink", "q"},
                                   {"decode_v4_h64_swa_extra", "extra_cache"},
                                   {"decode_v4_h64_swa_extra", "extra_k_bf16"},
                                   {"prefill_v32_h64", "q"},
                                   {"prefill_v32_h64", "lse"},
                                   {"prefill_v32_h64", "indices"}}) {
    auto golden = tools::Safetensors::read(kGolden + "/" + file + ".safetensors");
    std::vector<std::pair<std::string, Tensor>> tensors(golden.tensors().begin(),
                                                        golden.tensors().end());
    for (auto& [key, view] : tensors)
      if (key == name) view.shape[0] /= 2;
    tools::write_safetensors(path("bent.safetensors"), tensors, golden.metadata());
    const Output o = run("verify '" + path("bent.safetensors") + "'");
    EXPECT_EQ(o.code, 2) << file << " " << name << "\n" << o.out;
    expect_in(o.err, {"golden: ", "expected"});
  }
}

TEST_F(Cli, SoakFindsNoDriftAndNoLeak) {
  const Output o = run("soak --steps 400 --check-every 8 --threads 3 --seed 5");
  EXPECT_EQ(o.code, 0) << o.out << o.err;
  expect_in(o.out, {"no drift, no leak", "resident memory", "open files", "v32", "v4"});
#ifndef __SANITIZE_ADDRESS__  // whose allocator does not tell
  expect_in(o.out, {"heap in use"});
#endif
  // Nothing is compared in the first quarter, and little is shared: the pool starts all the same.
  const Output late = run("soak --steps 40 --check-every 39 --threads 1", "WINNOW_THREADS=16");
  EXPECT_EQ(late.code, 0) << late.out << late.err;
  // A CUDA build has threads of the driver, too.
  const size_t row = late.out.find("threads  ");
  ASSERT_NE(row, std::string::npos) << late.out;
  int first = 0;
  int last = 0;
  EXPECT_EQ(std::sscanf(late.out.c_str() + row, "threads %d %d", &first, &last), 2) << late.out;
  EXPECT_TRUE(first >= 16 && first <= 19 && last == first) << late.out;
  const Output damaged = run("soak --steps 80 --check-every 1 --damage-step 20");
  EXPECT_EQ(damaged.code, 1) << damaged.out << damaged.err;
  expect_in(damaged.out, {"FAILED", "step 20", "main cache"});
  // Fewer steps than lie between comparisons: one is made all the same.
  const Output few = run("soak --steps 16 --damage-step 8");
  EXPECT_EQ(few.code, 1) << few.out << few.err;
  expect_in(few.out, {"FAILED", "step 8", "main cache"});
  const Output none = run("soak --steps 8 --threads 64");
  EXPECT_EQ(none.code, 2);
  expect_in(none.err, {"--steps: expected at least 128", "64 threads", "found 8"});
  const Output wrong = run("soak --graph-replays 10");
  EXPECT_EQ(wrong.code, 2);
  expect_in(wrong.err, {"--graph-replays", "--device cuda"});
}

TEST_F(Cli, VerbsAgreeWithTheReference) {
  const std::pair<const char*, const char*> exact[] = {
      {"write", "--batch 5 --context 100 --format v4_fp8 --page 7"},
      {"select", "--context 300 --topk 40 --batch 3"},
      {"locate", "--context 300 --topk 40 --batch 3 --page 3"},
      {"mask", "--context 301 --topk 40 --batch 3"},
      {"lists", "--kind slots --context 301 --s-q 7 --batch 3 --page 3"},
      {"lists", "--kind c128a --context 1301 --s-q 7 --batch 3 --page 3"},
      {"lists", "--kind window --context 301 --s-q 7 --batch 3 --page 3"},
      {"lists", "--kind combined --context 301 --s-q 7 --batch 3"}};
  for (const auto& [verb, sizes] : exact) {
    std::string digest;
    for (const std::string& kernel : testing::cpu_kernels(verb)) {
      if (!testing::why_not(verb, kernel).empty()) continue;
      const json j = run_json(std::string(verb) + " --json --kernel " + kernel + " " + sizes);
      EXPECT_TRUE(j.at("ok").get<bool>()) << j;
      EXPECT_EQ(j.at("kernel"), kernel);
      if (digest.empty()) digest = j.at("digest");
      EXPECT_EQ(j.at("digest"), digest) << verb << " by " << kernel;
    }
  }
  for (const char* call : {"norm --batch 3",
                           "rotate --context 300 --batch 3 --heads 2",
                           "rotate --e4m3 --context 300 --batch 3 --heads 2",
                           "prepare_query --context 300 --batch 3 --heads 2",
                           "index_query --context 300 --batch 3",
                           "prepare_queries --context 300 --batch 3 --heads 2",
                           "prepare_queries --s-q 64 --repeat 1",  // a pair that nearly cancels
                           "norm_write --context 300 --batch 3",
                           "compress --context 300 --batch 2 --s-q 9",
                           "compress --s-q 129 --page 7 --repeat 1",  // a sum that nearly does
                           "compress --layer c128a --s-q 200 --batch 1",
                           "score --context 200 --index-heads 5 --s-q 2",
                           "score --bf16 --context 200 --select --topk 9",
                           "score --select --topk 9 --context 200",
                           "select --context 900 --topk 9 --blocks 20",
                           "attend --context 200 --heads 5 --topk 70",
                           "attend --model v4 --context 300 --heads 3",
                           "attend --cache bf16 --context 90 --heads 1 --topk 100",
                           "mha --batch 2 --s-q 9 --context 100 --heads 3",
                           "mha --s-q 9 --context 100 --topk 20",
                           "merge --batch 3 --heads 5 --parts 3",
                           "absorb --batch 3 --heads 2",
                           "absorb --output --batch 3 --heads 2"}) {
    const json j = run_json(std::string(call) + " --json");
    EXPECT_TRUE(j.at("ok").get<bool>()) << call << j;
    EXPECT_GT(j.at("us"), 0);
  }
  // Only what a context holds is attended to, however wide the list is.
  const json wide = run_json("attend --json --context 64 --topk 4096 --no-check");
  EXPECT_NEAR(wide.at("tflops").get<double>() * 1e6 * wide.at("us").get<double>(),
              2.0 * 16 * 64 * (576 + 512), 1);
  const json plan = run_json("plan --json --mode separate --query-lens 1,1,30 --seq-lens 9,70,40");
  EXPECT_EQ(plan.at("decodes"), 2);
  EXPECT_EQ(plan.at("prefill_tokens"), 30);
  EXPECT_EQ(plan.at("parts").size(), 2u);
  EXPECT_EQ(plan.at("parts")[1].at("mha"), false);
  EXPECT_EQ(run_json("plan --json --mha").at("mode"), "separate");
  expect_in(run("plan").out, {"decodes", "tiles of each worker", "attend"});
}

// The reference may take minutes: a terminal sees what is going on, a file nothing of it.
TEST_F(Cli, VerbsShowProgressOnATerminal) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  const std::string line = ptsname(terminal);
  const int kept = open(line.c_str(), O_RDWR | O_NOCTTY);  // what was written stays readable
  ASSERT_GE(kept, 0);
  const std::string call = "locate --context 64 --topk 8";
  const int status = std::system(
      (std::string("'") + WINNOW_PROGRAM + "' " + call + " >/dev/null 2>'" + line + "'").c_str());
  EXPECT_EQ(WEXITSTATUS(status), 0);
  char text[4096] = {};
  EXPECT_GT(read(terminal, text, sizeof(text) - 1), 0);
  expect_in(text, {"locate: first run", "comparing with the reference\r\033[K"});
  close(kept);
  close(terminal);
  EXPECT_EQ(run(call).err, "");
}

TEST_F(Cli, BenchWritesItsFields) {
  const Output o = run("bench locate --quick --cache warm --filter '16 tokens' --json '" +
                       path("bench.json") + "' --save '" + path("saved.json") + "' --commit abc");
  EXPECT_EQ(o.code, 0) << o.err;
  expect_in(o.out, {"roofs: ", "16 tokens topk 2048 warm", "simd", "stored / here"});
  const json results = json::parse(text_of(path("bench.json")));
  ASSERT_FALSE(results.empty());
  const std::vector<std::string> fields = {
      "stage",       "case",       "kernel",  "device",  "model",   "heads",  "topk",
      "extra",       "batch",      "s_q",     "context", "us",      "tflops", "gbps",
      "roof_tflops", "roof_share", "copy_us", "peer",    "peer_us", "ratio"};
  for (const auto& r : results) {
    std::vector<std::string> found;
    for (const auto& [key, value] : r.items()) found.push_back(key);
    EXPECT_EQ(found, fields);
    EXPECT_EQ(r["stage"], "locate");
    EXPECT_EQ(r["batch"], 16);
    EXPECT_GT(r["us"], 0);
    for (const char* none : {"model", "heads", "tflops", "peer", "ratio"})
      EXPECT_TRUE(r[none].is_null()) << none;
  }
  const json saved = json::parse(text_of(path("saved.json")));
  EXPECT_EQ(saved.at("results").size(), results.size());
  EXPECT_EQ(saved.at("header").at("commit"), "abc");
  EXPECT_GT(saved.at("header").at("roofs").at("read_gbps"), 0);
  const std::string rendered = text_of(path("saved.md"));
  expect_in(rendered, {"| stage |", "roofs: ", "abc", "16 tokens topk 2048 warm"});
  std::filesystem::remove(path("saved.md"));
  EXPECT_EQ(run("bench --render '" + path("saved.json") + "'").code, 0);
  EXPECT_EQ(text_of(path("saved.md")), rendered);
  EXPECT_EQ(run("bench --render '" + path("bench.json") + "'").code, 2);
  std::ofstream(path("turns.json")) << R"({"header": {"peers": {}}, "results": []})";
  const Output turns = run("bench --render '" + path("turns.json") + "'");
  EXPECT_EQ(turns.code, 2);
  expect_in(turns.err, {"turns.json", "in turns", "plot_readme.py"});
}

TEST_F(Cli, BenchRefusesPlacesBeforeItTimes) {
  for (const char* option : {"--json", "--save"}) {
    const Output o = run(std::string("bench locate ") + option + " '" + path(".") + "'");
    EXPECT_EQ(o.code, 2) << option;
    EXPECT_EQ(o.out, "") << option;
    expect_in(o.err, {"cannot be written"});
  }
  // A place that was checked is left as it was.
  EXPECT_EQ(run("bench locate --filter none --save '" + path("x.json") + "'").code, 2);
  EXPECT_FALSE(std::filesystem::exists(path("x.json")) || std::filesystem::exists(path("x.md")));
  expect_in(run("bench --render '" + path(".") + "'").err, {"cannot be read"});
  std::ofstream(path("broken.json")) << "[";
  expect_in(run("bench --render '" + path("broken.json") + "'").err,
            {"broken.json", "not a stored"});
  EXPECT_FALSE(std::filesystem::exists(path("broken.md")));
}

// A run whose output did not arrive has failed.
TEST_F(Cli, FullDisk) {
  ASSERT_TRUE(std::filesystem::exists("/dev/full"));
  for (const char* call : {"support", "plan --json", "locate --context 64 --topk 8", "--help"}) {
    const int status =
        std::system((std::string("'") + WINNOW_PROGRAM + "' " + call + " >/dev/full 2>&1").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 2) << call;
  }
  // Files of results are written whole or not at all. This one has no room for 2 KB.
  std::ofstream(path("kept.json")) << "of another run";
  const Output o =
      run("bench locate --quick --save '" + path("kept.json") + "'", "trap '' XFSZ; ulimit -f 4;");
  EXPECT_EQ(o.code, 2) << o.out;
  expect_in(o.err, {"kept.json: cannot be written"});
  EXPECT_EQ(text_of(path("kept.json")), "of another run");
  EXPECT_FALSE(std::filesystem::exists(path("kept.json.part")));
}

}  // namespace
}  // namespace winnow
