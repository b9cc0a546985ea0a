#include "store.h"

#include <filesystem>
#include <fstream>

#include "winnow/error.h"

namespace winnow::cli {

namespace {

namespace fs = std::filesystem;

bool put(const fs::path& place, const std::string& text, std::ios::openmode mode) {
  std::ofstream file(place, std::ios::binary | mode);
  return static_cast<bool>((file << text).flush());
}

[[noreturn]] void refuse(const std::string& path) {
  throw Error(ErrorCode::kRuntime, "bench: " + path + ": cannot be written");
}

}  // namespace

void check_place(const std::string& path) {
  std::error_code ignored;  // the stream says what is wrong
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, ignored);
  const bool there = fs::exists(path, ignored);
  if (!put(path, "", std::ios::app)) refuse(path);
  if (!there) fs::remove(path, ignored);
}

void store(const std::string& path, const std::string& text) {
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  fs::path place = path;
  if (fs::is_symlink(place, error)) place = fs::weakly_canonical(place, error);
  // A device or a pipe is written itself, and so is a file in a folder that takes no other.
  fs::path part = place;
  part += ".part";
  const bool plain = !fs::exists(place, error) || fs::is_regular_file(place, error);
  if (!plain || !put(part, "", std::ios::trunc)) {
    if (!put(place, text, std::ios::trunc)) refuse(path);
    return;
  }
  error.clear();
  const bool written = put(part, text, std::ios::trunc);
  if (written) fs::rename(part, place, error);
  if (written && !error) return;
  fs::remove(part, error);
  refuse(path);
}

}  // namespace winnow::cli
