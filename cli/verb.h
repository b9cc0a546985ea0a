// What the commands of one verb share: options, timing, digest, report.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "accuracy.h"
#include "commands.h"
#include "problems.h"
#include "progress.h"
#include "winnow/tensor.h"

namespace winnow::cli {

struct VerbOptions {
  bench::Sizes sizes;
  std::string model = "v32";
  std::string kernel;  // "" takes the fastest that fits
  int64_t repeat = 5;
  bool check = true, json = false;
};

// What a verb's random problem has beside its tokens. An option that would change nothing is
// refused.
enum class Over { kTokens, kContext, kPages };
// --batch --s-q --context --page --seed --kernel --repeat --no-check --json; the others a stage
// adds itself.
void add_common(CLI::App& cmd, VerbOptions& options, Over over);
void add_model(CLI::App& cmd, VerbOptions& options);
void add_heads(CLI::App& cmd, VerbOptions& options);
void resolve(VerbOptions& options);  // names -> values; refuses more tokens than int32 counts

// One stage tried once: what went in and out, how long it took, how far it is from the reference.
struct Trial {
  std::string stage, kernel;
  std::vector<std::pair<std::string, Tensor>> tensors;  // shapes to print
  double us = 0;
  double flops = 0, bytes = 0;
  uint64_t digest = 0;
  std::string deviation;
  bool ok = true;
  mutable tools::Progress progress;  // until report()
};

// Runs `call(kernel name)` with the kernel requested, or with null for the library's choice; best
// of `repeat`. Fills kernel and us.
void time_trial(Trial& trial, const VerbOptions& options,
                const std::function<void(const char* kernel)>& call);

// FNV-1a over the bytes; the same inputs give the same digest on every machine and kernel only for
// the integer stages and write.
uint64_t digest(std::span<const std::byte> bytes, uint64_t seed = 0xcbf29ce484222325u);

// Prints the trial and returns the exit code.
int report(const Trial& trial, bool json);

// A verb with one output that is compared with the reference's.
struct Single {
  const char* stage;
  Tensor out;
  tools::Bar bar = tools::kExact;
  double flops = 0, bytes = 0;
  // RoPE turned the last 64 of each row, in neighbouring pairs, after a rounding to bf16.
  bool turned = false;
};
// Times `call(kernel name)`, keeps the digest of the output, runs the reference, compares, reports.
int try_out(const Single& verb, const VerbOptions& options,
            const std::function<void(const char* kernel)>& call);

}  // namespace winnow::cli
