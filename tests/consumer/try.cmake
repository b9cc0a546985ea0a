# Installs the build into a folder of its own, moves it, and tries the consumer against it. Moving
# shows that the package holds no path of the build.
set(work ${build}/consumer)
file(REMOVE_RECURSE ${work})
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "${ARGN}: ${result}")
  endif()
endfunction()

step(${CMAKE_COMMAND} --install ${build} --prefix ${work}/first)
file(RENAME ${work}/first ${work}/prefix)
file(GLOB_RECURSE license ${work}/prefix/LICENSE)
if(NOT license)
  message(FATAL_ERROR "the licence is not installed")
endif()
foreach(program ${programs})
  step(${work}/prefix/${program} --help)
endforeach()
list(PREPEND prefix_path ${work}/prefix)
set(flags "")
if(sanitize)
  set(flags "-fsanitize=${sanitize}")
endif()
step(${CMAKE_COMMAND} -S ${source} -B ${work}/build -G ${generator} "-DCMAKE_PREFIX_PATH=${prefix_path}"
     -DWINNOW_WANTED=${version} -DCMAKE_C_FLAGS=${flags} -DCMAKE_CXX_FLAGS=${flags})
step(${CMAKE_COMMAND} --build ${work}/build)
step(${work}/build/use_cpp)
step(${work}/build/use_c)

# The build folder as the package.
step(${CMAKE_COMMAND} -S ${source} -B ${work}/of_build -G ${generator} -Dwinnow_DIR=${build}
     "-DCMAKE_PREFIX_PATH=${prefix_path}" -DWINNOW_WANTED=${version} -DCMAKE_C_FLAGS=${flags}
     -DCMAKE_CXX_FLAGS=${flags})
step(${CMAKE_COMMAND} --build ${work}/of_build)
step(${work}/of_build/use_cpp)

# winnow's sources as a folder of another project; compiling them again would take minutes.
step(${CMAKE_COMMAND} -S ${source}/embedding -B ${work}/embedding -G ${generator}
     "-DCMAKE_PREFIX_PATH=${prefix_path}" -DWINNOW_SOURCE=${source}/../..)

# A project in C alone.
step(${CMAKE_COMMAND} -S ${source}/c_only -B ${work}/c_only -G ${generator} "-DCMAKE_PREFIX_PATH=${prefix_path}"
     -DWINNOW_WANTED=${version} -DCMAKE_C_FLAGS=${flags})
step(${CMAKE_COMMAND} --build ${work}/c_only)
step(${work}/c_only/use_c)

# No CMake at all: compilers and pkg-config, with and without --static.
find_program(PKG_CONFIG NAMES pkg-config pkgconf)
if(NOT PKG_CONFIG)
  message(STATUS "there is no pkg-config here: winnow.pc was not tried")
  return()
endif()
file(GLOB_RECURSE pc ${work}/prefix/winnow.pc)
get_filename_component(pc_folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
foreach(static "" --static)
  execute_process(COMMAND ${PKG_CONFIG} ${static} --cflags --libs winnow OUTPUT_VARIABLE options
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(options UNIX_COMMAND "${options}")
  # Shared libraries are found at run time in the folders in which the linker found them.
  set(folders ${options})
  list(FILTER folders INCLUDE REGEX "^-L")
  list(TRANSFORM folders REPLACE "^-L" "-Wl,-rpath,")
  list(APPEND options ${folders})
  step(${cc} -std=c11 ${flags} ${source}/use.c ${options} -o ${work}/pc_c)
  step(${work}/pc_c)
  step(${cxx} -std=c++20 ${flags} ${source}/use.cpp ${options} -o ${work}/pc_cpp)
  step(${work}/pc_cpp)
endforeach()
