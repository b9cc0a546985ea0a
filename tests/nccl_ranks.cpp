// Ranks over NCCL as threads of one process on one GPU, beside the double: collectives, agreement,
// a layer whose bits are the double's, 100 replays of its graph with changing lengths, and ranks
// that are missing or differ. nccl_ranks N runs N ranks; more than one on a GPU needs NCCL 2.30 or
// newer, NCCL_MULTI_RANK_GPU_ENABLE=1 and a small NCCL_MAX_CTAS. Ends by itself after two minutes.
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device_ranks.h"
#include "ranks_problem.h"
#include "winnow/nccl.h"

namespace winnow {
namespace {

using testing::OwnDevice;
using testing::RankProblem;
using testing::RankRequest;
using Result = RankProblem::Result;

std::atomic<int> failures = 0;

void expect(bool ok, const char* what, int32_t rank) {
  if (ok) return;
  std::printf("FAILED on rank %d: %s\n", rank, what);
  ++failures;
}

// Where a run that hangs has come to.
void said(const char* what) {
  static const auto began = std::chrono::steady_clock::now();
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
  std::printf("%6.2f s: %s\n", since.count(), what);
  std::fflush(stdout);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

ncclComm_t new_comm(const ncclUniqueId& id, int32_t ranks, int32_t rank) {
  ncclComm_t comm = nullptr;
  if (ncclCommInitRank(&comm, ranks, id, rank) != ncclSuccess) {
    std::printf("FAILED: ncclCommInitRank: %s\n", ncclGetLastError(nullptr));
    std::_Exit(1);
  }
  return comm;
}

// body(rank, NCCL's communicator) on every rank; it returns false where it has aborted that.
template <class Body>
void on_ranks(int32_t ranks, const Body& body) {
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) std::_Exit(1);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      testing::expect_cuda(cudaSetDevice(0), "device");
      const ncclComm_t comm = new_comm(id, ranks, r);
      bool alive = true;
      try {
        alive = body(r, comm);
      } catch (const Error& e) {
        expect(false, e.what(), r);
      }
      if (alive) ncclCommDestroy(comm);
    });
  for (std::thread& t : threads) t.join();
}

// Decodes, one of them with a speculative token, of lengths that depend on the step.
RankProblem step_problem(int step) {
  std::vector<RankRequest> batch;
  for (const RankRequest& r : {RankRequest{1, 180}, {2, 90}, {1, 3}, {1, 64}})
    batch.push_back({r.query, r.query + (r.seq + step * 37) % 190});
  RankProblem problem(batch);
  problem.longest = 200;
  problem.fill_all = true;
  return problem;
}

// What the double gives for a step.
std::vector<Result> by_threads(const RankProblem& problem, int32_t ranks, Parallel parallel) {
  std::vector<Result> results(ranks);
  testing::DeviceRanks group(ranks);
  const auto errors = group.run([&](Communicator& comm) {
    const OwnDevice device(DeviceKind::kCuda);
    RankProblem own = problem;
    own.device = device.get();
    Parallel way = parallel;
    way.comm = &comm;
    results[comm.rank()] = own.run(way);
  });
  for (int32_t r = 0; r < ranks; ++r) expect(errors[r].empty(), errors[r].c_str(), r);
  return results;
}

void check_collectives(int32_t ranks) {
  std::barrier together(ranks);
  on_ranks(ranks, [&](int32_t rank, ncclComm_t nccl) {
    NcclCommunicator comm(nccl);
    const OwnDevice device(DeviceKind::kCuda);
    const auto stream = static_cast<cudaStream_t>(device.get().stream);
    constexpr size_t kBytes = 4096;
    const size_t all = ranks * kBytes;
    // A copy to memory that is not pinned may wait for the stream inside the driver, where another
    // rank's launch then waits for it. Here nothing is copied before the stream is done, either.
    testing::MappedVector<uint8_t> send(all), came(all);
    const auto value = [](int32_t from, int32_t to, size_t i) {
      return static_cast<uint8_t>(from * 31 + to * 7 + i);
    };
    for (int32_t to = 0; to < ranks; ++to)
      for (size_t i = 0; i < kBytes; ++i) send[to * kBytes + i] = value(rank, to, i);
    const testing::DeviceWorkspace from(device.get(), all), to(device.get(), all);
    const auto copy = [&](void* target, const void* source) {
      testing::expect_cuda(cudaMemcpyAsync(target, source, all, cudaMemcpyDefault, stream), "copy");
    };
    copy(from.data(), send.data());
    bool right = testing::stream_finished(device.get());
    if (rank == 0) said("communicators are there");
    // What allocates or frees may wait for the device, and so for another rank's collective.
    together.arrive_and_wait();
    comm.all_gather(from.data(), to.data(), kBytes, device.get());
    right = right && testing::stream_finished(device.get());
    copy(came.data(), to.data());
    right = right && testing::stream_finished(device.get());
    for (int32_t r = 0; r < ranks; ++r)
      for (size_t i = 0; i < kBytes; ++i) right = right && came[r * kBytes + i] == value(r, 0, i);
    expect(right, "all_gather", rank);
    together.arrive_and_wait();
    if (rank == 0) said("all_gather ran");
    comm.all_to_all(from.data(), to.data(), kBytes, device.get());
    right = testing::stream_finished(device.get());
    copy(came.data(), to.data());
    right = right && testing::stream_finished(device.get());
    for (int32_t r = 0; r < ranks; ++r)
      for (size_t i = 0; i < kBytes; ++i)
        right = right && came[r * kBytes + i] == value(r, rank, i);
    expect(right, "all_to_all", rank);
    together.arrive_and_wait();
    if (rank == 0) said("all_to_all ran");
    constexpr size_t kMessage = 500;
    std::vector<uint8_t> told(ranks * kMessage);
    comm.exchange(send.data(), told.data(), kMessage);
    right = true;
    for (int32_t r = 0; r < ranks; ++r)
      right = right && told[r * kMessage + kMessage - 1] == value(r, 0, kMessage - 1);
    expect(right, "exchange", rank);
    together.arrive_and_wait();
    return true;
  });
}

// A layer over NCCL has the double's bits, eagerly and as a graph that is replayed with other
// lengths.
void check_layers(int32_t ranks, Spread spread, Wire wire) {
  constexpr int kSteps = 100, kCompared = 3;
  const Parallel parallel{.spread = spread, .interleave = 7, .wire = wire};
  std::vector<std::vector<Result>> want;
  for (int step = 0; step < kCompared; ++step)
    want.push_back(by_threads(step_problem(step), ranks, parallel));
  said("the double is done");
  std::barrier together(ranks);
  on_ranks(ranks, [&](int32_t rank, ncclComm_t nccl) {
    NcclCommunicator comm(nccl);
    const OwnDevice device(DeviceKind::kCuda);
    const auto stream = static_cast<cudaStream_t>(device.get().stream);
    Parallel way = parallel;
    way.comm = &comm;
    RankProblem first = step_problem(0);
    first.device = device.get();
    const Shard shard = RankProblem::held(way);
    together.arrive_and_wait();
    Plan plan(first.options(way));
    together.arrive_and_wait();
    plan.refill(first.batch());
    together.arrive_and_wait();
    if (rank == 0) said("a plan is there");
    const auto call = first.prepare(plan);
    const auto eager = first.prepare(plan);
    together.arrive_and_wait();  // nothing is allocated while another rank waits on the device
    pipeline(call->args);
    bool right = testing::stream_finished(device.get());
    Result got = first.result(*call, shard);
    expect(right && same_bits(got.out, want[0][rank].out), "outputs", rank);
    expect(same_bits(got.lse, want[0][rank].lse), "lse", rank);
    together.arrive_and_wait();
    if (rank == 0) said("a layer ran");

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    testing::expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    pipeline(call->args);
    testing::expect_cuda(cudaStreamEndCapture(stream, &graph), "end");
    testing::expect_cuda(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
    together.arrive_and_wait();
    for (int step = 0; step < kSteps; ++step) {
      const RankProblem now = step_problem(step);
      plan.refill(now.batch());
      now.fill_inputs(*call, way);
      now.fill_inputs(*eager, way);
      testing::expect_cuda(cudaGraphLaunch(replay, stream), "replay");
      right = testing::stream_finished(device.get());
      pipeline(eager->args);
      right = right && testing::stream_finished(device.get());
      const Result replayed = now.result(*call, shard), direct = now.result(*eager, shard);
      expect(right && same_bits(replayed.out, direct.out), "a replay's outputs", rank);
      expect(same_bits(replayed.lse, direct.lse), "a replay's lse", rank);
      if (rank == 0 && step % 25 == 0) said("replays run");
      if (step < kCompared)
        expect(same_bits(replayed.out, want[step][rank].out), "a replay beside the double", rank);
    }
    together.arrive_and_wait();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    return true;
  });
}

// Ranks that differ throw one text; a rank that does not come leaves the others their deadline.
void check_faults(int32_t ranks) {
  if (ranks == 1) return;
  std::vector<std::string> texts(ranks);
  std::barrier together(ranks);
  on_ranks(ranks, [&](int32_t rank, ncclComm_t nccl) {
    NcclCommunicator comm(nccl, std::chrono::milliseconds(1000));
    const OwnDevice device(DeviceKind::kCuda);
    RankProblem problem = step_problem(0);
    problem.device = device.get();
    const Parallel way{.comm = &comm, .spread = Spread::kContext};
    together.arrive_and_wait();
    Plan plan(problem.options(way));
    together.arrive_and_wait();
    if (rank == 1) ++problem.seq_lens[0];
    try {
      plan.refill(problem.batch());
    } catch (const Error& e) {
      texts[rank] = e.what();
    }
    if (rank == 1) --problem.seq_lens[0];
    plan.refill(problem.batch());  // all may go on
    together.arrive_and_wait();
    if (rank == 1) {
      together.arrive_and_wait();
      ncclCommAbort(nccl);  // a rank that is lost
      return false;
    }
    const auto began = std::chrono::steady_clock::now();
    std::string why;
    try {
      plan.refill(problem.batch());
    } catch (const Error& e) {
      why = e.what();
    }
    const auto took = std::chrono::steady_clock::now() - began;
    expect(why.find("refill: nccl: exchange: no answer within 1000 ms") == 0, why.c_str(), rank);
    expect(took < std::chrono::milliseconds(2000), "a missing rank takes too long", rank);
    try {
      plan.refill(problem.batch());
      expect(false, "a spent communicator goes on", rank);
    } catch (const Error&) {
    }
    together.arrive_and_wait();
    ncclCommAbort(nccl);  // frees the stream
    return false;
  });
  for (int32_t r = 0; r < ranks; ++r) {
    expect(texts[r] == texts[0], texts[r].c_str(), r);
    expect(texts[r].find("on rank 1") != std::string::npos, texts[r].c_str(), r);
  }
}

}  // namespace
}  // namespace winnow

int main(int count, char** words) {
  const int32_t ranks = count > 1 ? std::atoi(words[1]) : 1;
  alarm(120);
  int version = 0;
  ncclGetVersion(&version);
  std::printf("NCCL %d, %d ranks\n", version, ranks);
  std::fflush(stdout);
  winnow::check_collectives(ranks);
  winnow::said("collectives are done");
  for (const winnow::Spread spread : {winnow::Spread::kContext, winnow::Spread::kHeads})
    winnow::check_layers(ranks, spread, winnow::Wire::kF32);
  winnow::check_layers(ranks, winnow::Spread::kContext, winnow::Wire::kBf16);
  winnow::said("layers and graphs are done");
  winnow::check_faults(ranks);
  winnow::said("faults are done");
  std::printf("%d failures\n", winnow::failures.load());
  std::fflush(stdout);
  // Threads of a communicator that was aborted may linger.
  std::_Exit(winnow::failures == 0 ? 0 : 1);
}
