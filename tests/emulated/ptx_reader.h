// Walks through the text of PTX.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string>
#include <string_view>

#include "emulated/ptx.h"

namespace winnow::emulated {

inline bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.';
}
inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// A position in a text.
struct Reader {
  std::string_view text;
  size_t at = 0;

  void skip() {
    while (at < text.size()) {
      if (is_space(text[at])) ++at;
      else if (text.compare(at, 2, "//") == 0) at = std::min(text.find('\n', at), text.size());
      else if (text.compare(at, 2, "/*") == 0) at = text.find("*/", at) + 2;
      else break;
    }
  }
  bool done() {
    skip();
    return at >= text.size();
  }
  char peek() {
    skip();
    return at < text.size() ? text[at] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at;
    return true;
  }
  std::string_view name() {
    skip();
    const size_t begin = at;
    for (; at < text.size(); ++at) {
      if (text.compare(at, 2, "::") == 0) ++at;  // shared::cluster
      else if (!is_name(text[at])) break;
    }
    return text.substr(begin, at - begin);
  }
  std::string_view until(char c) {
    const size_t begin = at;
    at = std::min(text.find(c, at), text.size());
    const std::string_view found = text.substr(begin, at - begin);
    if (at < text.size()) ++at;
    return found;
  }
  std::string_view line() { return until('\n'); }
};

inline uint64_t number(std::string_view text, bool& negative) {
  negative = !text.empty() && text[0] == '-';
  if (negative) text.remove_prefix(1);
  if (!text.empty() && text.back() == 'U') text.remove_suffix(1);
  int base = 10;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
    text.remove_prefix(2);
    base = 16;
  } else if (text.size() > 1 && text[0] == '0' &&
             (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D')) {
    text.remove_prefix(2);
    base = 16;
  }
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, base);
  return negative ? 0 - value : value;
}

// ".param .align 16 .b8 name[24]": its type's bytes, alignment and name.
struct Declared {
  size_t bytes = 0, align = 0;
  std::string name;
  bool is_array = false;
};
inline Declared declared(Reader& r) {
  Declared d;
  size_t element = 0;
  for (;;) {
    const std::string_view word = r.name();
    if (word == ".align") {
      bool negative;
      d.align = number(r.name(), negative);
    } else if (!word.empty() && word[0] == '.') {
      if (const Type type = type_of(word.substr(1)); type != Type::kNone) element = bytes_of(type);
    } else {
      d.name = word;
      break;
    }
  }
  d.bytes = element;
  if (r.take('[')) {
    bool negative;
    const std::string_view count = r.name();
    d.is_array = true;
    d.bytes = count.empty() ? 0 : element * number(count, negative);
    r.take(']');
  }
  if (d.align == 0) d.align = element;
  return d;
}

}  // namespace winnow::emulated
