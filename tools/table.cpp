#include "table.h"

#include <algorithm>

namespace winnow::tools {

namespace {

// Characters, not bytes: µ and × are two bytes of UTF-8 and one column.
size_t columns(const std::string& s) {
  return static_cast<size_t>(
      std::count_if(s.begin(), s.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

Table::Table(std::vector<std::string> headers) : headers_(std::move(headers)) {
  for (std::string& h : headers_) {
    right_.push_back(!h.empty() && h[0] == '>');
    if (right_.back()) h.erase(0, 1);
  }
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(headers_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<size_t> width;
  width.reserve(headers_.size());
  for (const std::string& h : headers_) width.push_back(columns(h));
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], columns(row[i]));
  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string s;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string pad(width[i] - columns(cells[i]), ' ');
      s += (i ? "  " : "") + (right_[i] ? pad + cells[i] : cells[i] + pad);
    }
    out += s.substr(0, s.find_last_not_of(' ') + 1) + "\n";
  };
  line(headers_);
  for (const auto& row : rows_) line(row);
  return out;
}

std::string Table::markdown() const {
  std::string out = "|";
  for (const std::string& h : headers_) out += " " + h + " |";
  out += "\n|";
  for (const bool right : right_) out += right ? "---:|" : "---|";
  for (const auto& row : rows_) {
    out += "\n|";
    for (const std::string& cell : row) out += " " + cell + " |";
  }
  return out + "\n";
}

}  // namespace winnow::tools
