// The requests of `winnow run` and `winnow soak`: they arrive, prefill, decode and finish, as in a
// serving engine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "random.h"

namespace winnow::cli {

struct Request {
  int32_t length = 0;                       // tokens whose KV is in the cache
  int32_t prompt = 0;                       // tokens to prefill up to
  int32_t last = 0;                         // length at which it finishes
  std::vector<int32_t> pages, state_pages;  // of the token cache; of the compressed cache
};

struct Limits {
  int32_t requests = 8;      // at the same time
  int32_t context = 8192;    // four times the 2,048 keys that V3.2 attends to
  int32_t step_tokens = 64;  // of one batch
  int32_t page = 64;
  int32_t ratio = 1;  // tokens per compressed state; 1: no compressed cache
};

// One step's batch: decodes first, then prefills, as plans want it.
struct Step {
  std::vector<Request*> requests;
  std::vector<int32_t> query_starts, seq_lens;
  std::vector<Request*> arrived;  // their prefix, `length` tokens, is still to be written
  int32_t decodes = 0, prefills = 0, finished = 0;
  int32_t tokens() const { return query_starts.back(); }
};

class Requests {
 public:
  Requests(const Limits& limits, uint64_t seed);
  // The next batch. Half of the places are taken at the start; a request arrives in every step that
  // has a free one. It brings a cached prefix and a prompt to prefill, a chunk a step.
  const Step& next();
  // Accounts for the batch: its tokens are in the cache now, and who is done leaves.
  void done();
  // Drops a request chosen at random, between two batches; false if there is none.
  bool evict();

  int64_t pages() const { return pages_; }  // that the caches need
  int64_t state_pages() const { return state_pages_; }
  int32_t table_width() const { return width_; }
  int32_t state_width() const { return state_width_; }

 private:
  void admit();
  void give_back(const Request& request);

  Limits limits_;
  tools::Random random_;
  int32_t width_, state_width_;
  int64_t pages_, state_pages_;
  std::vector<int32_t> free_pages_, free_state_pages_;
  std::vector<std::unique_ptr<Request>> active_;
  Step step_;
};

}  // namespace winnow::cli
