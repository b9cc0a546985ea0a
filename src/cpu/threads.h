// CPU workers: one pool for the process. A call from inside the pool, or while another thread uses
// it, runs in the calling thread alone, so a parallel caller is never oversubscribed.
#pragma once

#include <cstdint>
#include <type_traits>

namespace winnow::internal::cpu {

// Workers a parallel call may use, the caller included: WINNOW_THREADS, else the cores of the
// process.
int threads();

namespace detail {
using Body = void (*)(void* context, int64_t task, int worker) noexcept;
void run(int64_t tasks, Body body, void* context);
}  // namespace detail

// f(task, worker) for every task in [0, tasks), each once, 0 <= worker < threads(); returns when
// all are done. Tasks are handed out one by one in ascending order; where there is one for each
// worker or fewer, worker w begins with task w if it is there in time. Does not allocate once the
// pool exists.
template <class F>
void parallel_for(int64_t tasks, F&& f) {
  using Fn = std::remove_reference_t<F>;
  detail::run(
      tasks,
      [](void* c, int64_t task, int worker) noexcept { (*static_cast<Fn*>(c))(task, worker); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace winnow::internal::cpu
