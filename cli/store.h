// Files of results that `winnow bench` leaves.
#pragma once

#include <string>

namespace winnow::cli {

// Throws Error where the place cannot be written, now instead of after minutes of timing.
void check_place(const std::string& path);

// The text as the file, whole or not at all: where it cannot be written, what was there stays.
// Makes missing folders. Throws Error.
void store(const std::string& path, const std::string& text);

}  // namespace winnow::cli
