// Values that are made on first use and live as long as the process.
#pragma once

#include <atomic>
#include <memory>

#include "core/namespaces.h"

namespace winnow::internal::core {

// What `make` gives, made by the first caller and kept at `place`. It is never destroyed, since
// static destructors may make calls. No lock is held meanwhile, as one of a function's static
// variable would be: a process that forks while another of its threads is making the value has a
// child in which that thread does not go on. Several threads may make it; the first one's stays.
template <class T, class Make>
const T& made_once(std::atomic<const T*>& place, Make&& make) {
  const T* value = place.load(std::memory_order_acquire);
  if (value) return *value;
  auto fresh = std::make_unique<const T>(make());
  if (!place.compare_exchange_strong(value, fresh.get(), std::memory_order_acq_rel)) return *value;
  return *fresh.release();
}

}  // namespace winnow::internal::core
