# SPDX-License-Identifier: MIT
# Install and export: find_package(coterie) gives coterie::core.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/coterie)

install(TARGETS coterie_core EXPORT coterieTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
if(TARGET coterie_cli)
  install(TARGETS coterie_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

install(EXPORT coterieTargets NAMESPACE coterie:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/coterieConfig.cmake.in
  ${PROJECT_BINARY_DIR}/coterieConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 every minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/coterieConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/coterieConfig.cmake
  ${PROJECT_BINARY_DIR}/coterieConfigVersion.cmake DESTINATION ${package_dir})
