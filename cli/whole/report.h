// How `winnow layer` and `winnow run` show whole layers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "whole/stack.h"

namespace winnow::cli::whole {

// Times of one phase: kernels and totals of every step of a layer.
using Totals = std::array<Total, kTimed>;

std::string table_of(const Layer& layer, const Totals& totals, const Checks& checks, int64_t runs);
nlohmann::ordered_json json_of(const Layer& layer, const Totals& totals, const Checks& checks);

}  // namespace winnow::cli::whole
