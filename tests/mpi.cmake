# Ranks as processes, under mpirun: with the MPI that CMake finds, and with MPICH where both are there.
# MPI is optional; nothing but these tests and the example uses it.
find_package(MPI QUIET COMPONENTS CXX)
if(NOT MPI_CXX_FOUND OR WINNOW_SANITIZE OR WINNOW_CUDA)
  return()
endif()

add_executable(mpi_ranks mpi_ranks.cpp)
target_include_directories(mpi_ranks PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tools)
target_link_libraries(mpi_ranks PRIVATE winnow_internals MPI::MPI_CXX)

# Launchers differ in how a job is allowed more ranks than cores, or to outlive a rank.
function(winnow_mpi_tests name program launcher)
  execute_process(COMMAND ${launcher} --version OUTPUT_VARIABLE version ERROR_QUIET)
  set(crowded "")
  set(outlive -disable-auto-cleanup)
  if(version MATCHES "Open MPI|OpenRTE")
    set(crowded --oversubscribe)
    set(outlive --enable-recovery)
  endif()
  set(environment WINNOW_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
  foreach(ranks 1 2 3 4 8)
    add_test(NAME ${name}_${ranks}_ranks COMMAND ${launcher} -n ${ranks} ${crowded} ${program})
    set_tests_properties(${name}_${ranks}_ranks PROPERTIES TIMEOUT 120 ENVIRONMENT "${environment}"
                         PROCESSORS 2)
  endforeach()
  set(faults options kernel throws tokens lengths late lost lost_queries)
  if(version MATCHES "Open MPI|OpenRTE")
    list(APPEND faults killed)  # MPICH's launcher ends the whole job whatever it is asked
  endif()
  foreach(fault ${faults})
    add_test(NAME ${name}_${fault}
             COMMAND ${CMAKE_COMMAND} -Dprogram=${program} -Dlauncher=${launcher} -Dranks=3
                     "-Doptions=${crowded};${outlive}" -Dfault=${fault}
                     -P ${CMAKE_CURRENT_SOURCE_DIR}/mpi_fault.cmake)
    set_tests_properties(${name}_${fault} PROPERTIES TIMEOUT 60 ENVIRONMENT "${environment}"
                         PROCESSORS 2)
  endforeach()
endfunction()
winnow_mpi_tests(mpi $<TARGET_FILE:mpi_ranks> ${MPIEXEC_EXECUTABLE})

find_program(MPICH_CXX mpicxx.mpich)
find_program(MPICH_EXEC mpiexec.mpich)
execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE first ERROR_QUIET)
if(MPICH_CXX AND MPICH_EXEC AND first MATCHES "Open MPI|OpenRTE" AND NOT BUILD_SHARED_LIBS)
  set(program ${CMAKE_CURRENT_BINARY_DIR}/mpich_ranks)
  add_custom_command(OUTPUT ${program} DEPENDS mpi_ranks.cpp ranks_problem.h ranks_v4_problem.h winnow
    COMMAND ${MPICH_CXX} -std=c++20 -O1 -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src
            -I${PROJECT_SOURCE_DIR}/tools ${CMAKE_CURRENT_SOURCE_DIR}/mpi_ranks.cpp
            -o ${program} $<TARGET_FILE:winnow> $<TARGET_FILE:Highway::hwy> -pthread
    VERBATIM)
  add_custom_target(mpich_program ALL DEPENDS ${program})
  winnow_mpi_tests(mpich ${program} ${MPICH_EXEC})
endif()
