# `cmake --install`: headers, library, program and the package config that find_package(winnow) reads.
include(CMakePackageConfigHelpers)
install(TARGETS winnow EXPORT winnow-targets)
install(DIRECTORY include/winnow DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET winnow-cli)
  install(TARGETS winnow-cli)
endif()
set(where ${CMAKE_INSTALL_LIBDIR}/cmake/winnow)
install(EXPORT winnow-targets NAMESPACE winnow:: DESTINATION ${where})
configure_package_config_file(cmake/winnow-config.cmake.in ${PROJECT_BINARY_DIR}/winnow-config.cmake
                              INSTALL_DESTINATION ${where})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/winnow-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/winnow-config.cmake ${PROJECT_BINARY_DIR}/winnow-config-version.cmake
              cmake/FindHighway.cmake DESTINATION ${where})
