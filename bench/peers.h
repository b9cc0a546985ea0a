// Other implementations' times, stored as data in bench/peers/*.json and built into the program.
//
// A file: {"machine": words, "applies": {"device", "contains": [..], "lacks": [..]}, "peers":
// [{"peer", "source", "version", "method", "threads", "figures": [{"stage", "model", "heads", ...,
// "us"}]}]}. `contains` and `lacks` are matched against the machine's description; a figure matches
// a case when every field that it has is equal.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "harness.h"

namespace winnow::bench {

// Fills peer and peer_us with the fastest figure of this case on this kind of machine, if any.
void find_peer(Result& result);

// Whether the figures of a file were measured on a machine so described: "cpu", "AMD EPYC, family
// 25 model 17 (AVX2, ...)".
bool measured_on(const std::string& file, const std::string& device, const std::string& machine);

// The files, as name and text (generated from the folder when the program is built).
const std::vector<std::pair<std::string, std::string>>& peer_files();

}  // namespace winnow::bench
