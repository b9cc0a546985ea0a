#include "requests.h"

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/check.h"
#include "winnow/error.h"

namespace winnow::cli {

namespace {

int32_t pages_for(int32_t tokens, int32_t page) { return ceil_div(tokens, page); }

// Free page ids in random order, so that neighbours in a sequence are none in memory.
std::vector<int32_t> shuffled(int64_t count, tools::Random& random) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) ids[i] = static_cast<int32_t>(i);
  for (int64_t i = count - 1; i > 0; --i) std::swap(ids[i], ids[random.draw(0, i)]);
  return ids;
}

// Pages for every request's longest sequence. Slots are int32; more of them are refused before the
// ids of millions of pages are drawn.
int64_t checked_pages(const Limits& limits, int32_t width) {
  const int64_t pages = int64_t{width} * limits.requests, tokens = pages * limits.page;
  if (tokens > INT32_MAX)
    throw Error(ErrorCode::kInvalidArgument, cat("--context: expected at most ", INT32_MAX,
                                                 " tokens of all --requests, found ", tokens));
  return pages;
}

void take(std::vector<int32_t>& from, std::vector<int32_t>& to, int32_t count) {
  to.assign(from.end() - count, from.end());
  from.resize(from.size() - static_cast<size_t>(count));
}

}  // namespace

Requests::Requests(const Limits& limits, uint64_t seed)
    : limits_(limits),
      random_(seed),
      width_(pages_for(limits.context, limits.page)),
      state_width_(limits.ratio > 1
                       ? pages_for(std::max(limits.context / limits.ratio, 1), limits.page)
                       : 0),
      pages_(checked_pages(limits, width_)),
      state_pages_(int64_t{state_width_} * limits.requests),
      free_pages_(shuffled(pages_, random_)),
      free_state_pages_(shuffled(state_pages_, random_)) {}

void Requests::admit() {
  auto r = std::make_unique<Request>();
  const int32_t context = limits_.context, room = std::max(context / 8, 1);
  r->last = static_cast<int32_t>(random_.draw(std::max(context / 2, 1), context));
  r->prompt = std::max(r->last - static_cast<int32_t>(random_.draw(1, std::min(room, 24))), 1);
  r->length = std::max(r->prompt - static_cast<int32_t>(random_.draw(1, std::min(room, 96))), 0);
  take(free_pages_, r->pages, width_);
  take(free_state_pages_, r->state_pages, state_width_);
  step_.arrived.push_back(r.get());
  active_.push_back(std::move(r));
}

const Step& Requests::next() {
  step_ = {};
  const bool first = active_.empty();
  const int32_t places = limits_.requests - static_cast<int32_t>(active_.size());
  const int32_t arriving = first ? ceil_div(limits_.requests, 2) : std::min(places, 1);
  for (int32_t i = 0; i < arriving; ++i) admit();

  step_.query_starts = {0};
  const auto add = [&](Request& r, int32_t tokens) {
    step_.requests.push_back(&r);
    step_.query_starts.push_back(step_.tokens() + tokens);
    step_.seq_lens.push_back(r.length + tokens);
  };
  for (const auto& r : active_)
    if (r->length >= r->prompt && step_.tokens() < limits_.step_tokens) add(*r, 1), ++step_.decodes;
  for (const auto& r : active_) {
    const int32_t chunk = std::min(r->prompt - r->length, limits_.step_tokens - step_.tokens());
    if (chunk > 0) add(*r, chunk), ++step_.prefills;
  }
  return step_;
}

void Requests::done() {
  for (size_t i = 0; i < step_.requests.size(); ++i) step_.requests[i]->length = step_.seq_lens[i];
  step_.finished = static_cast<int32_t>(std::erase_if(active_, [&](const auto& r) {
    if (r->length < r->last) return false;
    give_back(*r);
    return true;
  }));
}

bool Requests::evict() {
  if (active_.empty()) return false;
  const auto r = active_.begin() + random_.draw(0, static_cast<int64_t>(active_.size()) - 1);
  give_back(**r);
  active_.erase(r);
  return true;
}

void Requests::give_back(const Request& r) {
  free_pages_.insert(free_pages_.end(), r.pages.begin(), r.pages.end());
  free_state_pages_.insert(free_state_pages_.end(), r.state_pages.begin(), r.state_pages.end());
}

}  // namespace winnow::cli
