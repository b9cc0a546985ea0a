// Starting winnow-ranks, the program that links MPI, under mpirun.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow::cli {

struct RankJob {
  int32_t ranks = 1;
  int32_t threads = 0;             // CPU workers of each; 0: an even share of the cores
  std::vector<std::string> words;  // of winnow-ranks: a command and its options
};

struct RankOutput {
  int status = 0;                  // of the launcher
  std::vector<std::string> lines;  // that rank 0 printed
};

// Runs the job to its end. Throws Error where there is no winnow-ranks or no launcher, and says how
// to get them. WINNOW_MPIRUN names a launcher; else mpirun or mpiexec of PATH.
RankOutput start_ranks(const std::string& command, const RankJob& job);

// `winnow run --ranks`: prints a table, or JSON; 0, or 1 if a check failed.
struct RankedRun {
  int32_t ranks = 0;  // 0: not over ranks
  std::string spread = "context";
  int32_t interleave = 64;
  bool json = false;
  std::vector<std::string> options;  // of `winnow run`, as winnow-ranks takes them
};
int run_over_ranks(const RankedRun& run);

// `winnow bench parallel`.
struct RankedBench {
  std::vector<int32_t> ranks;
  std::string filter, kernel, json, save, commit;
  bool quick = false;
};
void bench_over_ranks(const RankedBench& bench);

}  // namespace winnow::cli
