# `cmake --install`: headers, library, program and the package config that find_package(winnow) reads.
include(CMakePackageConfigHelpers)
install(TARGETS winnow EXPORT winnow-targets)
install(DIRECTORY include/winnow DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
# What is installed finds a Highway outside of the system's folders; programs hold the library itself.
# winnow-ranks stands where `winnow run --ranks` looks for it.
set_target_properties(winnow PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
foreach(program winnow-cli winnow-ranks)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
    install(TARGETS ${program})
  endif()
endforeach()
# What the C++ compiler links by itself and the C compiler does not: projects without C++ name it.
set(winnow_cxx_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
if(CMAKE_C_IMPLICIT_LINK_LIBRARIES)
  list(REMOVE_ITEM winnow_cxx_runtime ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})
endif()
list(REMOVE_DUPLICATES winnow_cxx_runtime)
set(where ${CMAKE_INSTALL_LIBDIR}/cmake/winnow)
install(EXPORT winnow-targets NAMESPACE winnow:: DESTINATION ${where})
configure_package_config_file(cmake/winnow-config.cmake.in ${PROJECT_BINARY_DIR}/winnow-config.cmake
                              INSTALL_DESTINATION ${where})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/winnow-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/winnow-config.cmake ${PROJECT_BINARY_DIR}/winnow-config-version.cmake
              cmake/FindHighway.cmake DESTINATION ${where})

# The build folder is a package too: find_package(winnow) with -Dwinnow_DIR=build/release.
export(EXPORT winnow-targets NAMESPACE winnow:: FILE ${PROJECT_BINARY_DIR}/winnow-targets.cmake)
file(COPY cmake/FindHighway.cmake DESTINATION ${PROJECT_BINARY_DIR})

# `pkg-config winnow`, wherever the installation is moved to. A static library is always linked with what
# it needs, the C++ runtime for C programs too; a shared one brings it along.
set(needs " -lhwy -pthread")
get_filename_component(highway_folder "${Highway_LIBRARY}" DIRECTORY)
if(NOT highway_folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  string(PREPEND needs " -L${highway_folder}")  # a compiler does not look there by itself
endif()
if(CMAKE_DL_LIBS)
  string(APPEND needs " -l${CMAKE_DL_LIBS}")
endif()
if(WINNOW_CUDA)
  string(APPEND needs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt")
endif()
foreach(library ${winnow_cxx_runtime})
  string(APPEND needs " -l${library}")
endforeach()
set(pc_libs "")
set(pc_libs_private "")
if(BUILD_SHARED_LIBS)
  set(pc_libs_private "${needs}")
else()
  set(pc_libs "${needs}")
endif()
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(cmake/winnow.pc.in ${PROJECT_BINARY_DIR}/winnow.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/winnow.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
