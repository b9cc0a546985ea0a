# Warnings and sanitizers for our own targets, and the flags of files named after an instruction set.
add_library(winnow_warnings INTERFACE)
target_compile_options(winnow_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wno-psabi;-Wno-missing-field-initializers>)

# Programs around the library: tests, benchmarks, the command line. UndefinedBehaviorSanitizer watches
# the library; in their own code it would take half of the time that they compile.
add_library(winnow_program INTERFACE)
target_link_libraries(winnow_program INTERFACE winnow_warnings)
if(WINNOW_SANITIZE MATCHES "undefined")
  target_compile_options(winnow_program INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize=undefined>)
endif()

if(WINNOW_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${WINNOW_SANITIZE}>
                      -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${WINNOW_SANITIZE})
endif()

# Kernels in portable vectors, which are compiled for every vector set; and all kernels for CPUs.
set(winnow_portable_kernels "/(.*simd|rows|topk)\\.cpp$")
set(winnow_cpu_kernels "/(.*simd|rows|topk|reference|.*_(avx2|avx512|avx512bf16|amx))\\.cpp$")

# The last word of a kernel's file name is its instruction set; such a file is compiled for that set
# alone and entered only after the CPU was asked. Files elsewhere are built for any x86-64.
function(winnow_isa_flags)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  set(avx2 -mavx2 -mfma -mf16c)
  # GCC 12 warns about the deliberately undefined operands inside its own AVX-512 headers. Register
  # tiles are arrays that must be unrolled away, in development builds as well: -O3. Not under
  # sanitizers, where that takes six times as long to compile as the preset's own level.
  if(NOT WINNOW_SANITIZE)
    set(unroll -O3)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(quiet -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set(avx512 ${unroll} ${quiet} -mavx512f -mavx512bw -mavx512dq -mavx512vl ${avx2})
  set(avx512bf16 -mavx512bf16 -mavx512vbmi ${avx512})
  set(amx -mamx-tile -mamx-bf16 -mamx-int8 ${avx512bf16})
  foreach(isa avx2 avx512 avx512bf16 amx)
    set(files ${ARGN})
    list(FILTER files INCLUDE REGEX "_${isa}\\.cpp$")
    if(files)
      set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS "${${isa}}")
    endif()
  endforeach()
endfunction()
