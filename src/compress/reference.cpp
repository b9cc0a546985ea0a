// compress, as specified.
#include <algorithm>
#include <cmath>

#include "compress/kernel.h"
#include "model/write_record.h"

namespace winnow::internal::compress {

namespace {

float value_at(const void* data, bool is_bf16, int64_t i) {
  return is_bf16 ? to_float(static_cast<const bf16*>(data)[i]) : static_cast<const float*>(data)[i];
}

float score_at(const Row& row, int64_t i) {
  return value_at(row.scores, row.are_bf16, i) + (row.bias ? row.bias[i] : 0);
}

// The weighted mean of an entry's rows, value by value; false if one of them is missing.
bool pool(const Params& p, int64_t token, float* pooled) {
  const int64_t last = position_of(p, token);
  Row rows[kMaxRows];
  int count = 0;
  for (int64_t j = last - rows_of_entry(p) + 1; j <= last; ++j) {
    if (j < 0) continue;
    rows[count] = row_of(p, token, last, j);
    if (rows[count++].values == nullptr) return false;
  }
  for (int64_t i = 0; i < p.width; ++i) {
    if (!p.gate) {
      pooled[i] = value_at(rows[0].values, rows[0].are_bf16, i);
      continue;
    }
    double largest = -INFINITY;
    for (int j = 0; j < count; ++j) largest = std::fmax(largest, score_at(rows[j], i));
    double sum = 0;
    double whole = 0;
    for (int j = 0; j < count; ++j) {
      const double weight = std::exp(score_at(rows[j], i) - largest);
      sum += weight * value_at(rows[j].values, rows[j].are_bf16, i);
      whole += weight;
    }
    pooled[i] = static_cast<float>(sum / whole);
  }
  return true;
}

// The entry that a token closes: latent, rotated, stored.
void store_entry(const Params& p, int64_t token) {
  const int64_t slot = p.cache.data ? p.slots[token * p.slot_stride] : -1;
  if (slot < 0 && p.latent == nullptr) return;
  float pooled[kMaxWidth] = {};
  bf16 row[kMaxWidth];
  if (!pool(p, token, pooled)) return;
  core::norm_row(p.norm, pooled, p.width, row);
  if (p.latent) std::copy_n(row, p.width, p.latent + token * p.latent_stride);
  if (slot < 0) return;
  if (p.rope.table) {
    const int64_t position = position_of(p, token) - p.ratio + 1;
    if (!core::in_table(p.rope, position)) return;
    core::Angles angles;
    core::load_angles(p.rope, position, angles);
    bf16* slice = row + core::rope_begin(p.rope, p.width);
    core::rotate_row(p.rope, angles, slice, slice);
  }
  if (p.hadamard) core::hadamard_row(row, row);
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    using R = decltype(record);
    write_record<R>(p.quantizer, row, row + R::kNope, page, slot % p.cache.page, p.cache.page);
  });
}

void store_row(const Params& p, int64_t token) {
  float* to = own_state_row(p, token);
  if (to == nullptr) return;
  const int64_t values = values_of(p);
  const int64_t from = token * p.row_stride;
  const float* bias = nullptr;
  if (p.bias) bias = p.bias + position_of(p, token) % p.ratio * p.bias_stride;
  for (int64_t i = 0; i < values; ++i) {
    to[i] = value_at(p.rows, p.rows_are_bf16, from + i);
    to[values + i] = value_at(p.rows, p.rows_are_bf16, from + values + i) + (bias ? bias[i] : 0);
  }
}

}  // namespace

void reference(const Params& p) noexcept {
  // All entries before any row: a row of the call may take the place of one that an entry needs.
  for (int64_t t = 0; t < p.tokens; ++t)
    if (closes(p, t)) store_entry(p, t);
  for (int64_t t = 0; t < p.tokens; ++t) store_row(p, t);
}

}  // namespace winnow::internal::compress
