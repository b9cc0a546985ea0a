// Reads a module: what functions and variables it has. Functions are read when they are asked for.
#include <cstring>

#include "emulated/machine.h"
#include "emulated/memory.h"
#include "emulated/ptx_reader.h"

namespace winnow::emulated {

Program::Program(std::string_view whole) : text(whole) {
  Reader r{whole};
  while (!r.done()) {
    const size_t begin = r.at;
    const std::string_view word = r.name();
    if (word.empty()) {
      ++r.at;
    } else if (word == ".visible" || word == ".weak" || word == ".extern") {
      continue;
    } else if (word == ".entry" || word == ".func") {
      const size_t brace = whole.find('{', r.at);
      const size_t semicolon = whole.find(';', r.at);
      if (semicolon < brace) {  // a declaration
        r.at = semicolon + 1;
        continue;
      }
      const std::string_view header = whole.substr(begin, brace - begin);
      int depth = 0;
      size_t at = brace;
      for (; at < whole.size(); ++at) {
        if (whole[at] == '{') ++depth;
        if (whole[at] == '}' && --depth == 0) break;
      }
      Reader name{header};
      name.name();
      if (name.take('(')) name.until(')');
      bodies[std::string(name.name())] = {header, whole.substr(brace + 1, at - brace - 1),
                                          word == ".entry"};
      r.at = at + 1;
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      Reader statement{r.until(';')};
      const Declared d = declared(statement);
      if (word == ".shared") {  // .extern: behind what a block has by itself
        globals[d.name] = {Space::kShared, -1, 0, d.align};
        continue;
      }
      const size_t bytes = std::max<size_t>(d.bytes, 1);
      memory.push_back(std::make_unique<std::byte[]>(bytes + 256));
      std::byte* base = memory.back().get();
      base += (256 - reinterpret_cast<uintptr_t>(base) % 256) % 256;
      std::memset(base, 0, bytes);
      if (statement.take('=')) {
        Reader values{statement.text, statement.at};
        const bool list = values.take('{');
        const size_t element = [&] {
          Reader again{statement.text};
          for (;;) {
            const std::string_view w = again.name();
            if (w == ".align") {
              again.name();
              continue;
            }
            if (const Type t = w.empty() ? Type::kNone : type_of(w.substr(1)); t != Type::kNone)
              return static_cast<size_t>(bytes_of(t));
          }
        }();
        for (size_t k = 0; (k + 1) * element <= bytes && values.peek() != '}' && !values.done();
             ++k) {
          bool negative;
          const bool minus = values.take('-');
          uint64_t value = number(values.name(), negative);
          if (minus) value = 0 - value;
          std::memcpy(base + k * element, &value, element);
          if (!values.take(',') || !list) break;
        }
      }
      add_memory(base, bytes);
      globals[d.name] = {Space::kGlobal, reinterpret_cast<int64_t>(base), bytes, d.align};
    } else if (word == ".file") {
      Reader line{r.line()};
      bool negative;
      const auto n = static_cast<uint32_t>(number(line.name(), negative));
      line.until('"');
      files[n] = std::string(line.until('"'));
    } else if (word == ".section") {
      r.until('}');
    } else {
      r.line();
    }
  }
  // .file lines may come last.
  for (size_t at = whole.find("\n\t.file\t"); at != whole.npos;
       at = whole.find("\n\t.file\t", at + 1)) {
    Reader line{whole, at + 8};
    bool negative;
    const auto n = static_cast<uint32_t>(number(line.name(), negative));
    line.until('"');
    files[n] = std::string(line.until('"'));
  }
}

const Function& Program::function(std::string_view name) {
  std::unique_ptr<Function>& f = functions[std::string(name)];
  if (f) return *f;
  const auto found = bodies.find(std::string(name));
  if (found == bodies.end()) throw Fault("no function " + std::string(name));
  auto made = std::make_unique<Function>();
  made->name = name;
  made->is_kernel = found->second.is_kernel;
  read_function(*this, *made, found->second);
  for (Instruction& i : made->code) {
    for (auto find :
         {find_arithmetic, find_bits, find_conversion, find_access, find_control, find_together})
      if (!i.run) i.run = find(i, *made);
    if (!i.run) throw Fault("the machine does not know the instruction " + std::string(i.name));
  }
  assign_slots(*made);
  f = std::move(made);
  return *f;
}

}  // namespace winnow::emulated
