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

// The files, as name and text (generated from the folder when the program is built).
const std::vector<std::pair<std::string, std::string>>& peer_files();

}  // namespace winnow::bench
