// The library's messages in Python's words.
#pragma once

#include <string>

namespace winnow::python {

// A message of winnow::Error with the names that Python's arguments have ("indices" for
// "lists[0].indices"), and with what to do about an int64 array where int32 is requested.
std::string in_python(std::string message);

}  // namespace winnow::python
