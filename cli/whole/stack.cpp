#include "whole/stack.h"

#include <cmath>

#include "core/formats.h"

namespace winnow::cli::whole {

namespace {

// next [tokens, hidden] = x + y, each row divided by its root mean square.
void add_and_normalise(const bf16* x, const bf16* y, int64_t tokens, int64_t hidden, bf16* next) {
  using internal::core::to_bf16;
  using internal::core::to_float;
  for (int64_t t = 0; t < tokens; ++t, x += hidden, y += hidden, next += hidden) {
    double squares = 0;
    for (int64_t k = 0; k < hidden; ++k) squares += std::pow(to_float(x[k]) + to_float(y[k]), 2);
    const auto factor =
        static_cast<float>(1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-6));
    for (int64_t k = 0; k < hidden; ++k)
      next[k] = to_bf16((to_float(x[k]) + to_float(y[k])) * factor);
  }
}

}  // namespace

Stack::Stack(const std::vector<Spec>& specs, const Capacity& capacity, const StackOptions& options)
    : options_(options), queue_(options.cuda), random_(options.seed), checks_(specs.size()) {
  Layer::Sources sources;
  const Exact* entries = nullptr;
  for (const Spec& spec : specs) {
    std::shared_ptr<const Weights>& weights = weights_[spec.kind];
    if (!weights)
      weights = options.weights.empty()
                    ? std::make_shared<Weights>(spec, queue_, options.seed + weights_.size())
                    : std::make_shared<Weights>(spec, queue_, options.weights, options.prefix);
    layers_.push_back(std::make_unique<Layer>(spec, weights, queue_, capacity, sources));
    Layer& layer = *layers_.back();
    if (options.check)
      exact_.push_back(std::make_unique<Exact>(layer.spec(), *weights, capacity, entries));
    if (spec.own_entries && spec.compressed()) {
      sources.entries = &layer;
      entries = options.check ? exact_.back().get() : nullptr;
    }
    if (spec.chooses) sources.choice = &layer;
    if (spec.finds_blocks) sources.blocks = &layer;
    inputs_.emplace_back(queue_, capacity.tokens * spec.hidden);
  }
}

void Stack::draw(Array<bf16>& x, int64_t tokens) {
  random_.normals(x.span().subspan(0, static_cast<size_t>(tokens * layers_[0]->spec().hidden)),
                  1.0f);
  x.to_device();
}

void Stack::fill(const Batch& batch) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    draw(inputs_[i], batch.tokens());
    layers_[i]->fill(batch, inputs_[i]);
    if (options_.check) exact_[i]->append(batch, inputs_[i].host());
  }
}

void Stack::run(const Batch& batch) {
  batch_ = batch;
  const int64_t tokens = batch.tokens(), hidden = layers_[0]->spec().hidden;
  draw(inputs_[0], tokens);
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i]->run(batch, inputs_[i]);
    if (options_.check) exact_[i]->append(batch, inputs_[i].host());
    if (i + 1 == layers_.size()) break;
    const Array<bf16>& y = layers_[i]->y();
    y.to_host(0, tokens * hidden);
    add_and_normalise(inputs_[i].host(), y.host(), tokens, hidden, inputs_[i + 1].host());
    inputs_[i + 1].to_device();
  }
}

void Stack::check() {
  const int64_t last = batch_.tokens() - 1;
  for (size_t i = 0; i < exact_.size(); ++i) {
    exact_[i]->check(*layers_[i], batch_, inputs_[i].host(), 0, checks_[i]);
    if (last > 0) exact_[i]->check(*layers_[i], batch_, inputs_[i].host(), last, checks_[i]);
  }
}

bool Stack::ok() const {
  for (const Checks& layer : checks_)
    for (const Check& c : layer)
      if (!c.ok) return false;
  return true;
}

}  // namespace winnow::cli::whole
