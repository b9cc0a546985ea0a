// winnow-ranks: a rank of `winnow run --ranks N` and of `winnow bench parallel`, which start it
// under mpirun. Rank 0 prints JSON, an object a line. Exit status: 0 done, 1 a check failed, 2 an
// error.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "ranks/ranks.h"
#include "winnow/model.h"
#include "winnow/mpi.h"

namespace winnow::cli {
namespace {

constexpr const char* kHelp =
    "A rank of `winnow run --ranks N` and of `winnow bench parallel`, which start it.\n"
    "With a launcher of your own:\n"
    "  mpirun -n N winnow-ranks run [--NAME VALUE ...]\n"
    "    spread interleave heads index-heads topk requests context step-tokens page steps seed\n"
    "    kernel deadline\n"
    "  mpirun -n N winnow-ranks bench [--NAME VALUE ...]\n"
    "    filter kernel milliseconds deadline\n"
    "Rank 0 prints JSON, an object a line. Exit status: 1 if a check fails, 2 after an error.\n";

bool asks_for_help(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::string(argv[i]) == "--help" || std::string(argv[i]) == "-h") return true;
  return false;
}

// Before MPI, which would report a misspelt option as ranks that were killed. Ranges are those of
// `winnow run`.
Words checked_words(const std::string& what, int argc, char** argv) {
  constexpr Allowed kText, kSeconds = {1, 1 << 20}, kHeads = {kMinHeads, kMaxHeads};
  constexpr Allowed kAny = {INT64_MIN, INT64_MAX}, kSteps = {1, int64_t{1} << 40};
  if (what == "run") {
    Words words(argc, argv,
                {{"spread", kText},
                 {"interleave", {1, 1 << 16}},
                 {"heads", kHeads},
                 {"index-heads", kHeads},
                 {"topk", {1, 1 << 20}},
                 {"requests", {1, 4096}},
                 {"context", {16, 1 << 24}},
                 {"step-tokens", {1, 1 << 16}},
                 {"page", {1, 1 << 16}},
                 {"steps", kSteps},
                 {"seed", kAny},
                 {"kernel", kText},
                 {"deadline", kSeconds}});
    spread_of(words.text("spread", "context"));
    return words;
  }
  if (what == "bench")
    return Words(argc, argv,
                 {{"filter", kText},
                  {"kernel", kText},
                  {"milliseconds", {1, 1 << 20}},
                  {"deadline", kSeconds}});
  throw Error(ErrorCode::kInvalidArgument, "expected run or bench, found '" + what + "'");
}

}  // namespace
}  // namespace winnow::cli

int main(int argc, char** argv) {
  using namespace winnow;
  using namespace winnow::cli;
  if (asks_for_help(argc, argv)) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::string what = argc > 1 ? argv[1] : "";
  std::unique_ptr<const Words> words;
  std::chrono::seconds deadline{};
  try {
    words = std::make_unique<const Words>(checked_words(what, argc, argv));
    deadline = std::chrono::seconds(words->number("deadline", 60));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "winnow-ranks: error: %s\nSee winnow-ranks --help.\n", e.what());
    return 2;
  }
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    MpiCommunicator comm(MPI_COMM_WORLD, deadline);
    status = what == "run" ? run_ranks(*words, comm) : bench_ranks(*words, comm);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "winnow-ranks: error: %s\n", e.what());
    // Others may be gone, and MPI_Finalize() would wait for them.
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Finalize();
  return status;
}
