# Ranks over NCCL, where it is installed: one rank with any version. WINNOW_TEST_NCCL_RANKS asks for
# more on the same GPU ("2;4;8"), which NCCL 2.30 and newer allow.
set(WINNOW_TEST_NCCL_RANKS "" CACHE STRING "numbers of NCCL ranks on one GPU to test besides 1")
if(NOT WINNOW_CUDA)
  return()
endif()
find_path(NCCL_INCLUDE nccl.h HINTS ENV NCCL_HOME PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ENV NCCL_HOME PATH_SUFFIXES lib)
if(NOT NCCL_INCLUDE OR NOT NCCL_LIBRARY)
  return()
endif()
add_executable(nccl_ranks nccl_ranks.cpp)
target_include_directories(nccl_ranks PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests
                                              ${PROJECT_SOURCE_DIR}/tools)
target_include_directories(nccl_ranks SYSTEM PRIVATE ${NCCL_INCLUDE})
target_compile_definitions(nccl_ranks PRIVATE WINNOW_WITH_CUDA=1)
target_link_libraries(nccl_ranks PRIVATE winnow_internals winnow_tools winnow_warnings ${WINNOW_CUDA_RUNTIME} ${NCCL_LIBRARY})
# Loading a kernel waits for the device, and so for another rank's collective: all are loaded at the start. Streams
# that share a hardware queue wait for each other: there are as many as CUDA allows.
foreach(ranks 1 ${WINNOW_TEST_NCCL_RANKS})
  add_test(NAME nccl_ranks_${ranks} COMMAND nccl_ranks ${ranks})
  set_tests_properties(nccl_ranks_${ranks} PROPERTIES TIMEOUT 150 RUN_SERIAL ON
    ENVIRONMENT "CUDA_MODULE_LOADING=EAGER;NCCL_MULTI_RANK_GPU_ENABLE=1;NCCL_MAX_CTAS=4;CUDA_DEVICE_MAX_CONNECTIONS=32")
endforeach()
