// Results as a table, as the JSON array that programs read, and as a stored file with its header.
#pragma once

#include <string>
#include <vector>

#include "harness.h"
#include "machine.h"

namespace winnow::bench {

// The header's lines: machine, commit, roofs.
std::string header_text(const Machine& machine, const Roofs& roofs);
std::string table_text(const Machine& machine, const std::vector<Result>& results);

// An array of objects with the fields stage, case, kernel, device, model, heads, topk, extra,
// batch, s_q, context, us, tflops, gbps, roof_tflops, roof_share, copy_us, peer, peer_us, ratio;
// null where not applicable.
std::string json_text(const std::vector<Result>& results);

// {"header": {...}, "results": [...]}: the form of bench/results/*.json.
std::string stored_text(const Machine& machine, const Roofs& roofs,
                        const std::vector<Result>& results);
// A stored file as Markdown, to lie beside it. Throws Error if it is not one.
std::string markdown_of(const std::string& stored, const std::string& file_name);

}  // namespace winnow::bench
