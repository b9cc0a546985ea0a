# What crosses stages and languages: C programs, each public header alone, the installed package seen
# by a consumer, README's code, the size of files, the documents' links and
# pictures.

# C ABI from C11.
file(GLOB c_tests CONFIGURE_DEPENDS *_test.c)
foreach(file ${c_tests})
  get_filename_component(name ${file} NAME_WE)
  add_executable(${name} ${file})
  target_compile_options(${name} PRIVATE -pedantic)
  set_target_properties(${name} PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PRIVATE winnow winnow_warnings m)
  add_test(NAME ${name} COMMAND ${name})
endforeach()

# Each public header compiles alone, twice over; winnow_c*.h as C11 too. A failure fails the build. A
# caller's warnings may be many.
set(strict -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Werror)
set(strict_c ${strict} -Wc++-compat -Wstrict-prototypes)
set(strict_cxx ${strict} -Wold-style-cast)
set(strict_gxx ${strict_cxx} -Wuseless-cast)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(strict_cxx ${strict_gxx})
endif()
file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include
     ${PROJECT_SOURCE_DIR}/include/winnow/*.h)
add_library(headers_alone OBJECT)
set_target_properties(headers_alone PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF)
target_compile_options(headers_alone PRIVATE $<$<COMPILE_LANGUAGE:C>:${strict_c}>
                                             $<$<COMPILE_LANGUAGE:CXX>:${strict_cxx}>)
target_link_libraries(headers_alone PRIVATE winnow)
# The adapters need their engine's headers: mpi.h is compiled where there is an MPI, nccl.h where
# there are NCCL and CUDA.
find_path(NCCL_INCLUDE nccl.h)
find_path(CUDA_RUNTIME_INCLUDE cuda_runtime_api.h PATHS /usr/local/cuda/include)
if(NOT MPI_CXX_FOUND)
  list(REMOVE_ITEM headers winnow/mpi.h)
else()
  target_link_libraries(headers_alone PRIVATE MPI::MPI_CXX)
endif()
if(NOT NCCL_INCLUDE OR NOT CUDA_RUNTIME_INCLUDE)
  list(REMOVE_ITEM headers winnow/nccl.h)
else()
  target_include_directories(headers_alone SYSTEM PRIVATE ${NCCL_INCLUDE} ${CUDA_RUNTIME_INCLUDE})
endif()
foreach(header ${headers})
  get_filename_component(name ${header} NAME_WE)
  set(languages cpp)
  if(name MATCHES "^winnow_c")
    list(APPEND languages c)
  endif()
  foreach(language ${languages})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.${language})
    file(CONFIGURE OUTPUT ${file} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
    target_sources(headers_alone PRIVATE ${file})
  endforeach()
endforeach()

# The same warnings where templates are instantiated and structs are filled in, by the compilers that are
# here, in the standards to come, and without exceptions.
find_program(CLANG NAMES clang-19 clang)
find_program(CLANGXX NAMES clang++-19 clang++)
function(strict_test name compiler standard file)
  add_test(NAME strict_${name} COMMAND ${compiler} -std=${standard} ${ARGN} -I${PROJECT_SOURCE_DIR}/include
                                       -fsyntax-only ${CMAKE_CURRENT_SOURCE_DIR}/consumer/${file})
endfunction()
foreach(standard 20 23)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    strict_test(gcc_cpp${standard} ${CMAKE_CXX_COMPILER} c++${standard} strict.cpp ${strict_gxx})
  endif()
  if(CLANGXX)
    strict_test(clang_cpp${standard} ${CLANGXX} c++${standard} strict.cpp ${strict} -Wold-style-cast)
  endif()
endforeach()
strict_test(without_exceptions ${CMAKE_CXX_COMPILER} c++20 strict.cpp ${strict_cxx} -fno-exceptions -fno-rtti)
strict_test(c ${CMAKE_C_COMPILER} c11 strict.c ${strict_c})
if(CLANG)
  strict_test(clang_c ${CLANG} c11 strict.c ${strict_c})
endif()

# What a shared library shows. A static build links one for this.
if(BUILD_SHARED_LIBS)
  set(shared_winnow winnow)
elseif(NOT WINNOW_SANITIZE)
  set(shared_winnow shared_winnow)
  add_library(shared_winnow SHARED $<TARGET_OBJECTS:winnow>)
  set_target_properties(shared_winnow PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS ${winnow_exports})
  target_link_options(shared_winnow PRIVATE LINKER:--version-script=${winnow_exports} LINKER:--no-undefined)
  target_link_libraries(shared_winnow PRIVATE $<TARGET_PROPERTY:winnow,LINK_LIBRARIES>)
endif()
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
if(shared_winnow)
  add_test(NAME exports_of_shared_library
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/exports.py $<TARGET_FILE:${shared_winnow}>
                   ${PROJECT_SOURCE_DIR}/include ${CMAKE_NM})
endif()
# The C headers have what the C++ ones have.
add_test(NAME c_api_of_headers
         COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/c_api.py ${PROJECT_SOURCE_DIR}/include)

# A plugin that holds winnow, loaded and unloaded by a program that knows its exception alone.
add_library(test_plugin MODULE plugin/plugin.cpp)
set_target_properties(test_plugin PROPERTIES CXX_VISIBILITY_PRESET hidden)
target_link_options(test_plugin PRIVATE -Wl,--exclude-libs,ALL)
target_link_libraries(test_plugin PRIVATE winnow winnow_warnings)
add_executable(plugin_host plugin/host.cpp)
target_include_directories(plugin_host PRIVATE ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(plugin_host PRIVATE ${CMAKE_DL_LIBS} winnow_warnings)
add_test(NAME plugin_unloads COMMAND plugin_host $<TARGET_FILE:test_plugin>)
set_tests_properties(plugin_unloads PROPERTIES ENVIRONMENT WINNOW_THREADS=4)

# A project that finds the installed package, builds and runs against it. The programs start where they
# were moved to.
set(programs "")
foreach(program winnow-cli winnow-ranks)
  if(TARGET ${program})
    list(APPEND programs ${CMAKE_INSTALL_BINDIR}/$<TARGET_FILE_NAME:${program}>)
  endif()
endforeach()
add_test(NAME consumer
         COMMAND ${CMAKE_COMMAND} -Dbuild=${PROJECT_BINARY_DIR} "-Dprograms=${programs}"
                 -Dsource=${CMAKE_CURRENT_SOURCE_DIR}/consumer -Dgenerator=${CMAKE_GENERATOR}
                 -Dsanitize=${WINNOW_SANITIZE} -Dversion=${PROJECT_VERSION}
                 "-Dprefix_path=${CMAKE_PREFIX_PATH}" -Dcc=${CMAKE_C_COMPILER} -Dcxx=${CMAKE_CXX_COMPILER}
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/consumer/try.cmake)
set_tests_properties(consumer PROPERTIES TIMEOUT 300)

# Tests of the documents have the label docs; the target docs builds what they run.
add_custom_target(docs)

# README's code blocks are whole programs: each one is built and run.
set(readme ${PROJECT_SOURCE_DIR}/README.md)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${readme})
foreach(language cpp c)
  file(READ ${readme} rest)
  set(fence "\n```${language}\n")
  string(LENGTH "${fence}" skip)
  set(number 0)
  string(FIND "${rest}" "${fence}" at)
  while(NOT at EQUAL -1)
    math(EXPR number "${number} + 1")
    math(EXPR at "${at} + ${skip}")
    string(SUBSTRING "${rest}" ${at} -1 rest)
    string(FIND "${rest}" "\n```\n" end)
    string(SUBSTRING "${rest}" 0 ${end} block)
    set(name readme_${language}_${number})
    file(CONFIGURE OUTPUT ${name}.${language} CONTENT "${block}\n" @ONLY)
    add_executable(${name} ${CMAKE_CURRENT_BINARY_DIR}/${name}.${language})
    set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
    # As a strict caller would: a field without a default is one that must be given.
    target_compile_options(${name} PRIVATE -Wall -Wextra -Wpedantic -Werror)
    target_link_libraries(${name} PRIVATE winnow)
    add_test(NAME ${name} COMMAND ${name})
    list(APPEND docs_tests ${name})
    add_dependencies(docs ${name})
    string(SUBSTRING "${rest}" ${end} -1 rest)
    string(FIND "${rest}" "${fence}" at)
  endwhile()
endforeach()

# README's table of kernels is what the program prints.
if(TARGET winnow-cli AND NOT WINNOW_CUDA)
  add_test(NAME readme_support_table
           COMMAND ${CMAKE_COMMAND} -Dprogram=$<TARGET_FILE:winnow-cli> -Dreadme=${readme}
                   -P ${CMAKE_CURRENT_SOURCE_DIR}/support_table.cmake)
  list(APPEND docs_tests readme_support_table)
  add_dependencies(docs winnow-cli)
endif()

if(WINNOW_EXAMPLES)
  foreach(name decode v4 prefill c v4_c)
    add_test(NAME example_${name} COMMAND example_${name})
  endforeach()
  if(TARGET example_parallel AND NOT WINNOW_SANITIZE)
    add_test(NAME example_parallel COMMAND ${MPIEXEC_EXECUTABLE} -n 2 $<TARGET_FILE:example_parallel>)
    set_tests_properties(example_parallel PROPERTIES TIMEOUT 120
      ENVIRONMENT "WINNOW_THREADS=1;OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
  endif()
endif()

add_test(NAME files_under_500_lines
         COMMAND ${CMAKE_COMMAND} -Droot=${PROJECT_SOURCE_DIR}
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/lines.cmake)
add_test(NAME links_of_documents
         COMMAND ${CMAKE_COMMAND} -Droot=${PROJECT_SOURCE_DIR}
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/links.cmake)
add_test(NAME promises_of_documents
         COMMAND ${CMAKE_COMMAND} -Droot=${PROJECT_SOURCE_DIR}
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/promises.cmake)
add_test(NAME every_function_is_swept
         COMMAND ${CMAKE_COMMAND} -Droot=${PROJECT_SOURCE_DIR}
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/swept.cmake)
# The stored pictures are what the script draws of the sources' sizes.
add_test(NAME pictures_of_documents
         COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/tools/draw_docs.py --check)
# The rules of design.md that text alone can break: who includes whom, namespaces, lengths of functions.
add_test(NAME rooms_of_sources COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/rooms.py ${PROJECT_SOURCE_DIR})
# README's plot and its tables of speed are what the script makes of the stored results.
add_test(NAME speeds_of_readme
         COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/tools/plot_readme.py --check)
set_tests_properties(${docs_tests} links_of_documents promises_of_documents files_under_500_lines
                     every_function_is_swept pictures_of_documents rooms_of_sources speeds_of_readme
                     PROPERTIES LABELS docs)
