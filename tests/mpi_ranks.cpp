// A rank of an MPI job, as tests/mpi.cmake starts it. Checks the collectives, pipeline() over heads
// and over queries against one rank, and over the context against ranks that are threads; with the
// name of a fault, what the living ranks say about it and how soon. Ends with 0 if all was right.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "ranks_problem.h"
#include "ranks_v4_problem.h"
#include "thread_ranks.h"
#include "winnow/mpi.h"

namespace {

using winnow::Communicator;
using winnow::MpiCommunicator;
using winnow::Parallel;
using winnow::Plan;
using winnow::Spread;
using winnow::testing::RankProblem;
using winnow::testing::RankProblemV4;

int failures = 0;

void expect(bool right, const char* what) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s\n", what);
}

void collectives(Communicator& comm) {
  const int32_t size = comm.size(), rank = comm.rank();
  for (const size_t bytes : {1u, 7u, 504u, 70000u}) {
    std::vector<uint8_t> send(bytes * size), recv(bytes * size);
    const auto value = [&](int from, int to, size_t i) {
      return static_cast<uint8_t>(from * 31 + to * 7 + i);
    };
    for (int to = 0; to < size; ++to)
      for (size_t i = 0; i < bytes; ++i) send[to * bytes + i] = value(rank, to, i);
    comm.all_to_all(send.data(), recv.data(), bytes, winnow::cpu());
    bool right = true;
    for (int from = 0; from < size; ++from)
      for (size_t i = 0; i < bytes; ++i) right &= recv[from * bytes + i] == value(from, rank, i);
    expect(right, "all_to_all");
    for (const bool exchange : {false, true}) {
      std::fill(recv.begin(), recv.end(), uint8_t{0});
      if (exchange) comm.exchange(send.data(), recv.data(), bytes);
      else comm.all_gather(send.data(), recv.data(), bytes, winnow::cpu());
      right = true;
      for (int from = 0; from < size; ++from)
        for (size_t i = 0; i < bytes; ++i) right &= recv[from * bytes + i] == value(from, 0, i);
      expect(right, exchange ? "exchange" : "all_gather");
    }
  }
}

template <class Result>
uint64_t hash_of(const Result& r) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const winnow::bf16 x : r.out) hash = (hash ^ x.bits) * 0x100000001b3;
  return hash;
}

void layers(Communicator& comm) {
  RankProblem problem(winnow::testing::rank_batch());
  // Computes every head by itself.
  problem.kernel = "simd";
  const int32_t ranks = comm.size();
  if (RankProblem::kHeads % ranks != 0) return;
  // Heads: the bits of one rank.
  const auto whole = problem.run(Parallel{});
  const auto own = problem.run({.comm = &comm, .spread = Spread::kHeads});
  const size_t width = RankProblem::kHeads / ranks * RankProblem::kValue;
  const size_t row = RankProblem::kHeads * RankProblem::kValue;
  bool same = true;
  for (size_t t = 0; t < static_cast<size_t>(problem.tokens); ++t)
    same &= std::memcmp(&own.out[t * width], &whole.out[t * row + comm.rank() * width],
                        width * sizeof(winnow::bf16)) == 0;
  expect(same, "the bits of one rank, heads over ranks");
  // Queries: the bits of one rank, over whole and over sharded caches.
  for (const bool sharded : {false, true}) {
    const Parallel parallel{
        .comm = &comm, .spread = Spread::kQueries, .interleave = 7, .sharded = sharded};
    const auto part = problem.run(parallel);
    const auto share = winnow::shard_batch(problem.batch(), parallel.shard());
    same = part.out.size() == share.tokens.size() * row;
    for (size_t i = 0; same && i < share.tokens.size(); ++i)
      same = std::memcmp(&part.out[i * row], &whole.out[static_cast<size_t>(share.tokens[i]) * row],
                         row * sizeof(winnow::bf16)) == 0;
    expect(same, sharded ? "the bits of one rank, queries over sharded caches"
                         : "the bits of one rank, queries over ranks");
    expect(sharded || part.records == whole.records, "the records of one rank");
  }
  // Context: one set of bits on every transport.
  const RankProblemV4 v4(winnow::testing::rank_batch(), {4, 16, true});
  const auto both = [&](Communicator& group) {
    const Parallel parallel{.comm = &group, .spread = Spread::kContext, .interleave = 7};
    return hash_of(problem.run(parallel)) ^ hash_of(v4.run(parallel)) * 31;
  };
  const uint64_t hash = both(comm);
  std::vector<uint64_t> hashes(ranks);
  comm.exchange(&hash, hashes.data(), sizeof hash);
  if (comm.rank() != 0) return;
  winnow::tools::ThreadRanks threads(ranks);
  const auto errors = threads.run([&](Communicator& other) {
    expect(both(other) == hashes[other.rank()], "the bits of ranks that are threads");
  });
  for (const std::string& e : errors) expect(e.empty(), e.c_str());
}

// Rank 1 does something else; the others must say so in time.
void fault(const std::string& what, Communicator& comm, std::chrono::milliseconds deadline) {
  const RankProblem problem(winnow::testing::rank_batch());
  const bool faulty = comm.rank() == 1;
  const bool queries = what == "lost_queries";
  winnow::PlanOptions o =
      problem.options({.comm = &comm, .spread = queries ? Spread::kQueries : Spread::kContext});
  if (faulty && what == "options") o.topk = 16;
  if (faulty && what == "kernel") o.target.kernel = "reference";
  const auto began = std::chrono::steady_clock::now();
  std::string text;
  try {
    if (faulty && what == "throws") o.page = 0;
    Plan plan(o);
    winnow::Batch batch = problem.batch();
    if (faulty && what == "tokens") batch.tokens = 40;
    std::vector<int32_t> lens(batch.seq_lens.begin(), batch.seq_lens.end());
    if (faulty && what == "lengths") lens[0] -= 1;
    batch.seq_lens = lens;
    if (faulty && what == "late") std::this_thread::sleep_for(deadline + std::chrono::seconds(1));
    if (faulty && what == "killed") std::raise(SIGKILL);
    plan.refill(batch);
    // Between agreement and the collective.
    if (faulty && (what == "lost" || queries)) std::_Exit(0);
    problem.run(plan);
  } catch (const winnow::Error& e) {
    text = e.what();
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::printf("[%d] %.2f s: %s\n", comm.rank(), seconds, text.c_str());
  std::fflush(stdout);
  if (faulty && what == "late") return;  // it met no fault of its own
  expect(!text.empty(), "an error on every living rank");
  if (!faulty) expect(text.find("rank 1") != std::string::npos, "an error that names rank 1");
  expect(seconds < std::chrono::duration<double>(deadline).count() + 1,
         "within the deadline + 1 s");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::string what = argc > 1 ? argv[1] : "";
  constexpr std::chrono::milliseconds kDeadline{1500};
  {
    MpiCommunicator comm(MPI_COMM_WORLD, what.empty() ? std::chrono::seconds(60) : kDeadline);
    try {
      if (what.empty()) {
        collectives(comm);
        layers(comm);
      } else {
        fault(what, comm, kDeadline);
      }
    } catch (const winnow::Error& e) {
      expect(false, e.what());
    }
  }
  std::printf("rank done, %d failures\n", failures);
  std::fflush(stdout);
  // MPI_Finalize() waits for ranks that a fault has taken.
  if (!what.empty()) std::_Exit(failures == 0 ? 0 : 1);
  MPI_Finalize();
  return failures == 0 ? 0 : 1;
}
