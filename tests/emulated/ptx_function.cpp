// Reads a function: its parameters, registers, variables, labels and instructions.
#include <cstring>
#include <unordered_map>

#include "emulated/machine.h"
#include "emulated/ptx_reader.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

struct Scope {
  int parent = -1;
  std::unordered_map<std::string, Operand> registers;
  std::unordered_map<std::string, int32_t> labels;
  std::unordered_map<std::string, Variable> variables;
};

class FunctionReader {
 public:
  FunctionReader(Program& program, Function& function) : program_(program), f_(function) {
    scopes_.emplace_back();
  }

  void header(std::string_view text);
  void body(std::string_view text);

 private:
  [[noreturn]] void fail(const std::string& why) {
    throw Fault("cannot read PTX of " + f_.name + ": " + why);
  }
  void parameters(Reader& r, std::vector<Variable>& to);
  void declare_registers(Reader r);
  void declare_variable(Reader r, std::string_view directive);
  void instruction(std::string_view statement);
  Operand operand(Reader& r);
  // Operands up to `end`, as a vector.
  Operand list(Reader& r, char end);
  Operand symbol(const std::string& name);
  Operand constant(uint64_t value) {
    const auto [found, is_new] = constants_.try_emplace(value, f_.constants.size());
    if (is_new) f_.constants.push_back(value);
    Operand o;
    o.kind = Operand::kConstant;
    o.at = static_cast<int32_t>(found->second);
    return o;
  }
  Operand new_register(bool wide) {
    Operand o;
    o.kind = Operand::kRegister;
    o.wide = wide;
    o.at = static_cast<int32_t>(f_.register_wide.size());
    f_.register_wide.push_back(wide);
    return o;
  }
  const Variable* find_variable(const std::string& name) {
    for (int s = scope_; s >= 0; s = scopes_[s].parent)
      if (auto found = scopes_[s].variables.find(name); found != scopes_[s].variables.end())
        return &found->second;
    if (auto found = program_.globals.find(name); found != program_.globals.end())
      return &found->second;
    return nullptr;
  }
  Variable lane_variable(size_t bytes, size_t align) {
    f_.lane_bytes = (f_.lane_bytes + align - 1) / align * align;
    Variable v{Space::kLane, static_cast<int64_t>(f_.lane_bytes), bytes, align};
    f_.lane_bytes += bytes;
    return v;
  }

  Program& program_;
  Function& f_;
  std::vector<Scope> scopes_;
  int scope_ = 0;
  std::unordered_map<uint64_t, size_t> constants_;
  struct Jump {
    int32_t operand;
    int scope;
    std::string label;
  };
  std::vector<Jump> jumps_;
  std::vector<Operand> vectors_;
  Place place_;
};

void FunctionReader::parameters(Reader& r, std::vector<Variable>& to) {
  while (!r.done() && r.peek() != ')') {
    const Declared d = declared(r);
    Variable v;
    if (f_.is_kernel) {
      f_.parameter_bytes = (f_.parameter_bytes + d.align - 1) / d.align * d.align;
      v = {Space::kParam, static_cast<int64_t>(f_.parameter_bytes), d.bytes, d.align};
      f_.parameter_bytes += d.bytes;
    } else {
      v = lane_variable(d.bytes, std::max<size_t>(d.align, 1));
    }
    to.push_back(v);
    scopes_[0].variables[d.name] = v;
    r.take(',');
  }
  r.take(')');
}

void FunctionReader::header(std::string_view text) {
  Reader r{text};
  r.name();  // .entry or .func
  if (r.take('(')) parameters(r, f_.results);
  r.name();
  if (r.take('(')) parameters(r, f_.parameters);
  if (const size_t at = text.find(".reqnctapercluster"); at != text.npos) {
    Reader dims{text.substr(at)};
    dims.name();
    bool negative;
    for (uint32_t& d : f_.cluster) {
      d = static_cast<uint32_t>(number(dims.name(), negative));
      dims.take(',');
    }
  }
}

void FunctionReader::declare_registers(Reader r) {
  r.name();
  const std::string_view type_name = r.name();
  const Type type = type_of(type_name.substr(1));
  while (!r.done()) {
    const std::string name(r.name());
    int count = 1;
    const bool many = r.take('<');
    if (many) {
      bool negative;
      count = static_cast<int>(number(r.name(), negative));
      r.take('>');
    }
    for (int i = 0; i < count; ++i) {
      Operand o;
      if (type == Type::kPred) {
        o.kind = Operand::kPredicate;
        o.at = f_.predicates++;
      } else if (type == Type::kB128) {  // two of 64 bits
        o.kind = Operand::kVector;
        o.count = 2;
        o.at = static_cast<int32_t>(vectors_.size());
        vectors_.push_back(new_register(true));
        vectors_.push_back(new_register(true));
      } else {
        o = new_register(bytes_of(type) == 8);
      }
      scopes_[scope_].registers[many ? name + std::to_string(i) : name] = o;
    }
    if (!r.take(',')) break;
  }
}

void FunctionReader::declare_variable(Reader r, std::string_view directive) {
  r.name();
  const Declared d = declared(r);
  if (directive == ".shared") {
    const size_t align = std::max<size_t>(d.align, 1);
    f_.shared_bytes = (f_.shared_bytes + align - 1) / align * align;
    scopes_[scope_].variables[d.name] = {Space::kShared, static_cast<int64_t>(f_.shared_bytes),
                                         d.bytes, align};
    f_.shared_bytes += d.bytes;
  } else {
    scopes_[scope_].variables[d.name] = lane_variable(d.bytes, std::max<size_t>(d.align, 1));
  }
}

Operand FunctionReader::symbol(const std::string& name) {
  Operand o;
  o.kind = Operand::kSymbol;
  o.wide = true;
  if (const Variable* v = find_variable(name)) {
    o.space = v->space;
    o.offset = v->offset;
    return o;
  }
  o.kind = Operand::kLabel;
  return o;
}

Operand FunctionReader::list(Reader& r, char end) {
  std::vector<Operand> parts;
  while (!r.take(end)) {
    parts.push_back(operand(r));
    r.take(',');
  }
  Operand o;
  o.kind = Operand::kVector;
  o.count = static_cast<uint8_t>(parts.size());
  o.at = static_cast<int32_t>(vectors_.size());
  vectors_.insert(vectors_.end(), parts.begin(), parts.end());
  return o;
}

Operand FunctionReader::operand(Reader& r) {
  if (r.take('{')) return list(r, '}');
  if (r.take('[')) {
    Operand o = operand(r);
    const Operand::Kind base = o.kind;
    if (base == Operand::kConstant) {
      o.offset = static_cast<int64_t>(f_.constants[o.at]);
    }
    o.base = base;
    if (base == Operand::kRegister) o.offset = 0;
    if (base == Operand::kSymbol && o.space == Space::kShared && o.offset < 0) {
      o.offset = 0;
      o.count = 1;  // behind the beginning of dynamic shared memory
    }
    o.kind = Operand::kAddress;
    if (r.take('+')) {
      bool negative;
      o.offset += static_cast<int64_t>(
          number(r.take('-') ? std::string("-") + std::string(r.name()) : std::string(r.name()),
                 negative));
    }
    if (r.take(',')) {  // coordinates of a tensor
      const Operand coordinates = operand(r);
      o.count = coordinates.count;
      // `at` is the base register; the vector's place is kept in front of it.
      Operand both = o;
      both.kind = Operand::kVector;
      both.count = static_cast<uint8_t>(coordinates.count + 1);
      both.at = static_cast<int32_t>(vectors_.size());
      vectors_.push_back(o);
      for (int i = 0; i < coordinates.count; ++i) {
        const Operand coordinate = vectors_[coordinates.at + i];
        vectors_.push_back(coordinate);
      }
      o = both;
    }
    r.take(']');
    return o;
  }
  const bool negated = r.take('!');
  bool minus = r.take('-');
  std::string name(r.name());
  if (name.empty()) fail("an operand at '" + std::string(r.text.substr(r.at, 40)) + "'");
  if (std::isdigit(static_cast<unsigned char>(name[0]))) {
    bool negative;
    uint64_t value = number(name, negative);
    if (minus) value = 0 - value;
    return constant(value);
  }
  if (name == "_") return {};
  if (const int special = special_register(name); special >= 0) {
    Operand o;
    o.kind = Operand::kSpecial;
    o.at = special;
    return o;
  }
  for (int s = scope_; s >= 0; s = scopes_[s].parent)
    if (auto found = scopes_[s].registers.find(name); found != scopes_[s].registers.end()) {
      Operand o = found->second;
      o.negated = negated;
      return o;
    }
  Operand o = symbol(name);
  if (o.kind == Operand::kLabel) {
    jumps_.push_back({-1, scope_, name});
    o.at = -1;
  }
  return o;
}

void FunctionReader::instruction(std::string_view statement) {
  Reader r{statement};
  Instruction i;
  if (r.take('@')) {
    i.guard_negated = r.take('!');
    const Operand guard = operand(r);
    if (guard.kind != Operand::kPredicate) fail("a guard in '" + std::string(statement) + "'");
    i.guard = guard.at;
  }
  i.name = r.name();
  if (i.name.empty()) fail("an instruction in '" + std::string(statement) + "'");
  for (int k = 1;; ++k) {
    const std::string_view part = part_of(i.name, k);
    if (part.empty()) break;
    if (part == "global") i.space = Space::kGlobal;
    if (part == "shared" || part == "shared::cta" || part == "shared::cluster")
      i.space = Space::kShared;
    if (part == "param" || part == "local") i.space = Space::kLane;
    if (part == "v2" || part == "x2") i.lanes = 2;
    if (part == "v4" || part == "x4") i.lanes = 4;
    if (const Type type = type_of(part); type != Type::kNone) {
      if (i.result == Type::kNone) i.result = type;
      i.type = type;
    }
  }
  if (i.type == Type::kB128 && part_of(i.name, 0) != "mov") {
    i.type = Type::kB64;
    i.lanes = 2;
  }
  std::vector<Operand> operands;
  std::vector<std::pair<size_t, size_t>> labels;  // operand, jump
  const bool is_call = part_of(i.name, 0) == "call";
  while (!r.done()) {
    if (is_call && r.take('(')) {
      operands.push_back(list(r, ')'));
      r.take(',');
      continue;
    }
    const size_t jumps = jumps_.size();
    operands.push_back(operand(r));
    if (jumps_.size() > jumps) labels.emplace_back(operands.size() - 1, jumps);
    if (r.take('|')) operands.push_back(operand(r));
    r.take(',');
  }
  i.count = static_cast<uint8_t>(operands.size());
  i.first = static_cast<int32_t>(f_.operands.size());
  for (const auto& [k, jump] : labels) jumps_[jump].operand = i.first + static_cast<int32_t>(k);
  f_.operands.insert(f_.operands.end(), operands.begin(), operands.end());
  if (f_.places.empty() || std::memcmp(&f_.places.back(), &place_, sizeof place_) != 0)
    f_.places.push_back(place_);
  i.where = static_cast<uint32_t>(f_.places.size() - 1);
  f_.code.push_back(i);
}

void FunctionReader::body(std::string_view text) {
  Reader r{text};
  while (!r.done()) {
    if (r.take('{')) {
      scopes_.push_back({scope_, {}, {}, {}});
      scope_ = static_cast<int>(scopes_.size()) - 1;
      continue;
    }
    if (r.take('}')) {
      scope_ = std::max(scopes_[scope_].parent, 0);
      continue;
    }
    if (r.take(';')) continue;
    const size_t begin = r.at;
    const std::string_view word = r.name();
    if (word == ".loc") {
      Reader line{r.line()};
      bool negative;
      place_ = {};
      place_.file = static_cast<uint32_t>(number(line.name(), negative));
      place_.line = static_cast<uint32_t>(number(line.name(), negative));
      if (const size_t at = line.text.find("inlined_at"); at != line.text.npos) {
        line.at = at + 10;
        place_.inlined_file = static_cast<uint32_t>(number(line.name(), negative));
        place_.inlined_line = static_cast<uint32_t>(number(line.name(), negative));
      }
      continue;
    }
    if (!word.empty() && word[0] == '.') {
      r.at = begin;
      const Reader statement{r.until(';')};
      if (word == ".reg") declare_registers(statement);
      if (word == ".shared" || word == ".local" || word == ".param")
        declare_variable(statement, word);
      continue;
    }
    if (!word.empty() && r.peek() == ':') {
      r.take(':');
      scopes_[scope_].labels[std::string(word)] = static_cast<int32_t>(f_.code.size());
      continue;
    }
    r.at = begin;
    instruction(r.until(';'));
  }
  for (const Jump& jump : jumps_) {
    int32_t target = -1;
    for (int s = jump.scope; s >= 0 && target < 0; s = scopes_[s].parent)
      if (auto found = scopes_[s].labels.find(jump.label); found != scopes_[s].labels.end())
        target = found->second;
    if (target >= 0) {
      f_.operands[jump.operand].at = target;
    } else if (program_.has(jump.label)) {
      // A function: its name's place in the text.
      f_.operands[jump.operand].offset =
          reinterpret_cast<int64_t>(program_.bodies.find(jump.label)->first.c_str());
    } else {
      fail("no label or variable " + jump.label);
    }
  }
  const auto base = static_cast<int32_t>(f_.operands.size());
  for (Operand& o : f_.operands)
    if (o.kind == Operand::kVector) o.at += base;
  for (Operand& o : vectors_)
    if (o.kind == Operand::kVector) o.at += base;
  f_.operands.insert(f_.operands.end(), vectors_.begin(), vectors_.end());
  f_.lane_bytes = (f_.lane_bytes + 15) / 16 * 16;
}

}  // namespace

void read_function(Program& program, Function& function, const Program::Body& text) {
  FunctionReader reader(program, function);
  reader.header(text.header);
  reader.body(text.body);
}

}  // namespace winnow::emulated
