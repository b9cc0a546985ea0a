// Text tables: columns as wide as their widest cell, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace winnow::tools {

class Table {
 public:
  // A header that begins with '>' marks a column of numbers.
  explicit Table(std::vector<std::string> headers);
  void add(std::vector<std::string> cells);
  size_t rows() const { return rows_.size(); }
  std::string text() const;      // aligned, two blanks between columns
  std::string markdown() const;  // a GitHub table

 private:
  std::vector<std::string> headers_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace winnow::tools
