# Every public function meets damaged arguments: each function of the C headers is named in the C
# sweeps (tests/c_api_hostile*.c), each that takes a struct also in what the fuzzer damages
# (tests/fuzz/c_calls.h), and each verb of the C++ headers in the C++ sweeps (tests/hostile*.cpp).
# python/tests/test_hostile.py compares Python's functions with its own sweep.
cmake_minimum_required(VERSION 3.25)

# The text of all files that match, without what has a meaning in lists.
function(read_all out)
  file(GLOB files ${ARGN})
  set(all "")
  foreach(file ${files})
    file(READ ${file} text)
    string(APPEND all "${text}")
  endforeach()
  string(REGEX REPLACE "[][;]" " " all "${all}")
  set(${out} "${all}" PARENT_SCOPE)
endfunction()

read_all(c_headers ${root}/include/winnow/winnow_c*.h)
read_all(c_sweeps ${root}/tests/c_api_hostile*.c)
read_all(damaged ${root}/tests/fuzz/c_*calls.h)
file(GLOB headers ${root}/include/winnow/*.h)
list(FILTER headers EXCLUDE REGEX "/(winnow_c.*|mpi|nccl)\\.h$")
read_all(cpp_headers ${headers})
read_all(cpp_sweeps ${root}/tests/hostile*.cpp)

set(missing "")
string(REGEX MATCHALL "\nwinnow_status winnow_[a-z0-9_]+\\([^)]*\\)|\n[a-z][a-z0-9_ *]* \\*?winnow_[a-z0-9_]+\\("
       functions "${c_headers}")
list(LENGTH functions count)
if(count LESS 80)
  message(FATAL_ERROR "found ${count} functions in winnow_c*.h: the expression misses most")
endif()
foreach(function ${functions})
  string(REGEX MATCH "winnow_([a-z0-9_]+)\\(" unused "${function}")
  set(name ${CMAKE_MATCH_1})
  set(known FALSE)
  if(name STREQUAL "tensor_of")
    continue()  # inline: it fills in a struct
  endif()
  string(REGEX REPLACE "_workspace_bytes$" "" verb "${name}")
  if(c_sweeps MATCHES "winnow_${name}[^a-z0-9_]" OR c_sweeps MATCHES "CALL\\(${name},"
     OR (NOT verb STREQUAL name AND c_sweeps MATCHES "BYTES\\(${verb},"))
    set(known TRUE)
  endif()
  if(NOT known)
    string(APPEND missing "  winnow_${name}: in no tests/c_api_hostile*.c\n")
  endif()
  if(function MATCHES "\\(const winnow_[a-z0-9_]+_args\\* args\\)"
     AND NOT damaged MATCHES "winnow_${name}[^a-z0-9_]")
    string(APPEND missing "  winnow_${name}: in no tests/fuzz/c_*calls.h\n")
  endif()
endforeach()

string(REGEX MATCHALL "\nvoid [a-z0-9_]+\\(const [A-Za-z0-9]+Args& args\\)" verbs "${cpp_headers}")
list(LENGTH verbs count)
if(count LESS 25)
  message(FATAL_ERROR "found ${count} verbs in the C++ headers: the expression misses most")
endif()
foreach(verb ${verbs})
  string(REGEX MATCH "void ([a-z0-9_]+)\\(" unused "${verb}")
  set(name ${CMAKE_MATCH_1})
  if(NOT cpp_sweeps MATCHES "{\"${name}[\"_]")  # a row of the table of verbs
    string(APPEND missing "  ${name}(): in no tests/hostile*_test.cpp\n")
  endif()
endforeach()
if(missing)
  message(FATAL_ERROR "functions that meet no damaged arguments:\n${missing}")
endif()
