// What a plan tells about itself and its batch.
#include "core/check.h"
#include "plan/state.h"

namespace winnow {

const PlanOptions& Plan::options() const { return state().options; }
Device Plan::device(const Target& call) const {
  const Device &own = state().options.target.device, &other = call.device;
  Check("plan").that(own.kind != DeviceKind::kCpu || other.kind == own.kind, "target.device.kind",
                     "the CPU, for which the plan was made", "another device");
  const bool same = own.kind == DeviceKind::kCuda && other.kind == own.kind;
  return same && other.index == own.index ? other : own;
}
Mode Plan::mode() const { return state().options.mode; }
int32_t Plan::request_count() const { return state().requests; }
int32_t Plan::tokens() const { return state().tokens; }
int32_t Plan::batch_tokens() const { return state().batch_tokens; }
int64_t Plan::gathered_rows() const { return state().gathered_rows; }
const BatchSplit& Plan::split() const { return state().split; }

namespace {
// The part of an array that counts; empty where the mode does not have it.
std::span<const int32_t> front(std::span<const int32_t> v, int32_t count) {
  return v.empty() ? v : v.first(count);
}
}  // namespace

std::span<const int32_t> Plan::query_lens() const {
  return front(state().query_lens, state().requests);
}
std::span<const int32_t> Plan::seq_lens() const {
  return front(state().seq_lens, state().requests);
}
std::span<const int32_t> Plan::request_ids() const {
  return front(state().request_ids, state().tokens);
}
std::span<const int32_t> Plan::positions() const {
  return front(state().positions, state().tokens);
}
std::span<const int32_t> Plan::key_ends() const { return front(state().key_ends, state().tokens); }
std::span<const int32_t> Plan::key_starts() const {
  return front(state().key_starts, state().tokens);
}
std::span<const int32_t> Plan::state_starts() const {
  return front(state().state_starts, state().tokens);
}
std::span<const int32_t> Plan::token_order() const {
  return front(state().token_order, state().queried.world * state().most);
}
std::span<const int32_t> Plan::prefix_lens() const {
  return state().sharded() ? front(state().prefix_lens, state().requests)
                           : std::span<const int32_t>();
}
std::span<const int32_t> Plan::token_rows() const {
  return front(state().token_rows, state().queried.world * state().most);
}
std::span<const int32_t> Plan::row_starts() const {
  return front(state().row_starts, state().requests);
}
std::span<const int32_t> Plan::prefill_requests() const {
  return front(state().prefill_requests, state().tokens);
}
std::span<const int32_t> Plan::workspace_starts() const {
  return front(state().starts, state().split.prefills);
}
std::span<const int32_t> Plan::compressed_lens() const {
  return front(state().compressed_lens, state().split.prefills);
}
std::span<const int32_t> Plan::gather_starts() const {
  return front(state().gather_starts, state().split.prefills);
}
std::span<const int32_t> Plan::gather_lens() const {
  return front(state().gather_lens, state().split.prefills);
}
std::span<const int32_t> Plan::gather_rows() const {
  return front(state().gather_rows, state().split.prefills);
}
std::span<const int32_t> Plan::arrays() const { return state().staging.all(); }
void Plan::upload(void* to, const Device& device) const { state().staging.send(to, device); }
std::span<const Part> Plan::parts() const {
  return std::span(state().parts).first(state().part_count);
}
std::span<const Chunk> Plan::chunks() const {
  return std::span(state().chunks).first(state().chunk_count);
}
Schedule Plan::schedule(int32_t part) const {
  return part >= 0 && static_cast<size_t>(part) < state().part_count ? state().schedules[part]
                                                                     : Schedule{};
}
size_t Plan::workspace_bytes() const { return state().choice.workspace_bytes; }
size_t Plan::gather_bytes() const { return state().gather_bytes; }

const char* Plan::kernel(Stage stage, int32_t part) const {
  Check("plan").choice(stage, "stage", Stage::kLists);
  const State& s = state();
  const bool filled = part >= 0 && static_cast<size_t>(part) < s.part_count && s.tokens > 0;
  const Part& p = s.parts[filled ? part : 0];
  if (stage == Stage::kAttend && filled && p.mha) return "";
  int64_t tokens = s.tokens > 0 ? s.tokens : s.options.max_tokens;
  if (stage == Stage::kAttend && filled) tokens = p.last_token - p.first_token;
  return internal::plan::kernel_for(s.choice, s.options, stage, tokens, filled && p.gathered);
}
const std::string& Plan::reasons(Stage stage) const {
  Check("plan").choice(stage, "stage", Stage::kLists);
  return state().choice.reasons[static_cast<size_t>(stage)];
}
const Usable& Plan::usable(Stage stage) const {
  Check("plan").choice(stage, "stage", Stage::kLists);
  return state().choice.usable[static_cast<size_t>(stage)];
}

}  // namespace winnow
