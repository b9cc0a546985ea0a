#include "messages.h"

#include <string_view>

namespace winnow::python {

namespace {

struct Renamed {
  std::string_view in_the_library;
  std::string_view in_python;
};

// Fields of the library's structs. The longer of two names that begin alike comes first.
constexpr Renamed kFields[] = {
    {"lists[0].", ""},
    {"lists[1].", "extra_"},
    {"lists[0]", "cache"},
    {"lists (columns)", "indices and extra_indices (columns)"},
    {"indexer.block_table", "index_table"},
    {"indexer.", "index_"},
    {"norm: norm.weight", "norm: weight"},
    {"norm.rows[1].norm.weight", "norm[1].weight"},
    {"norm.rows[1].", "norm[1]."},
    {"norm.norm.weight", "norm[0].weight"},
    {"norm.weight", "norm_weight"},
    {"norm.bias", "norm_bias"},
    {"norm.kind", "norm"},
    {"norm.eps", "eps"},
    {"rope.", ""},
    {"prologue.", ""},
    {"state.rows", "state"},
    {"state.table", "state_table"},
    {"parallel.", ""},
    {"target.kernel", "kernel"},
    {"blocks.size", "block"},
    {"blocks.within", "within"},
    {"blocks.best", "best"},
    {"Precision::", "precision "},
};

// Enumerators, which are texts in Python.
constexpr Renamed kChoices[] = {
    {"kPow2FloorAmax", "pow2_floor_amax"},
    {"kPow2", "pow2"},
    {"kAmax", "amax"},
    {"kDefault", "default"},
    {"kAuto", "auto"},
    {"kBf16", "bf16"},
    {"kMixed", "mixed"},
    {"kSeparate", "separate"},
    {"kDirect", "direct"},
    {"kFull", "full"},
    {"kFp8", "fp8"},
    {"kNone", "none"},
    {"kRms", "rms"},
    {"kLayer", "layer"},
    {"kInterleaved", "interleaved"},
    {"kHalf", "half"},
    {"kLast", "last"},
    {"kFirst", "first"},
    {"kHeads", "heads"},
    {"kContext", "context"},
    {"kQueries", "queries"},
};

// Outputs, which are `out` in every call of Python. The stage comes with the name: `ids` is an
// input of other stages.
constexpr Renamed kOutputs[] = {
    {"rope_table: table:", "rope_table: out:"},
    {"score: logits:", "score: out:"},
    {"score_select: ids:", "score_select: out:"},
    {"select: ids:", "select: out:"},
    {"locate: slots:", "locate: out:"},
    {"topk_mask: mask:", "topk_mask: out:"},
    {"compressed_slots: slots:", "compressed_slots: out:"},
    {"c128a_lists: lists:", "c128a_lists: out:"},
    {"window_lists: lists:", "window_lists: out:"},
    {"combined_lists: lists:", "combined_lists: out:"},
};

void rename(std::string& message, const Renamed& name) {
  const auto& [from, to] = name;
  for (size_t at = 0; (at = message.find(from, at)) != message.npos; at += to.size())
    message.replace(at, from.size(), to);
}

}  // namespace

std::string in_python(std::string message) {
  // Of functions about pages, which are no stage: the argument alone.
  if (constexpr std::string_view kModel = "model: "; message.starts_with(kModel))
    message.erase(0, kModel.size());
  for (const auto& [from, to] : kOutputs)
    if (message.starts_with(from)) message.replace(0, from.size(), to);
  for (const Renamed& field : kFields) rename(message, field);
  for (const Renamed& choice : kChoices) rename(message, choice);
  // torch.topk, torch.argsort and NumPy's defaults give int64.
  if (message.find(" int32, found ") != message.npos && message.ends_with(" int64"))
    message += "; convert it: .int() in PyTorch, .astype(\"int32\") in NumPy";
  return message;
}

}  // namespace winnow::python
