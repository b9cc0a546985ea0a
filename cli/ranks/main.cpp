// winnow-ranks: a rank of `winnow run --ranks N` and of `winnow bench parallel`, which start it
// under mpirun. Rank 0 prints JSON, an object a line. Exit status: 0 done, 1 a check failed, 2 an
// error.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "ranks/ranks.h"
#include "winnow/mpi.h"

int main(int argc, char** argv) {
  using namespace winnow;
  using namespace winnow::cli;
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    const std::string what = argc > 1 ? argv[1] : "";
    const Words words(argc, argv, 2);
    MpiCommunicator comm(MPI_COMM_WORLD, std::chrono::seconds(words.number("deadline", 60)));
    if (what == "run") status = run_ranks(words, comm);
    else if (what == "bench") status = bench_ranks(words, comm);
    else throw Error(ErrorCode::kInvalidArgument, "winnow-ranks: expected run or bench");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "winnow-ranks: error: %s\n", e.what());
    // Others may be gone, and MPI_Finalize() would wait for them.
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Finalize();
  return status;
}
