// `winnow run` with a real model: its layers' own sizes and kinds, projections included.
#pragma once

#include <cstdint>
#include <string>

#include "requests.h"

namespace winnow::cli::whole {

struct RunModelOptions {
  std::string model, cache = "fp8", device = "cpu", kernel;
  int64_t layers = 0;  // the first of the schedule; 0: the first of each kind
  int64_t steps = 6;
  Limits limits;
  uint64_t seed = 1;
  bool check = false, json = false;  // check every step, not the last one alone
};

// Exit status: 1 if a check failed.
int run_model(const RunModelOptions& options);

}  // namespace winnow::cli::whole
