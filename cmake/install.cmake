# SPDX-License-Identifier: MIT
# Install and export: find_package(coterie) gives coterie::core, pkg-config coterie its flags. Components:
# development (library, headers, package files), runtime (program, manual pages, completions), python.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/coterie)

install(TARGETS coterie_core EXPORT coterieTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development FILES_MATCHING PATTERN "*.h")
install(EXPORT coterieTargets NAMESPACE coterie:: DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/coterieConfig.cmake.in
  ${PROJECT_BINARY_DIR}/coterieConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 every minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/coterieConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/coterieConfig.cmake
  ${PROJECT_BINARY_DIR}/coterieConfigVersion.cmake DESTINATION ${package_dir} COMPONENT development)

# The library is static, so its own libraries are part of Libs. The prefix is found from the file's place.
set(COTERIE_PC_LIBS "-lstdc++ -lm -pthread")
if(COTERIE_WITH_CUDA)
  string(APPEND COTERIE_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
file(RELATIVE_PATH COTERIE_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/coterie.pc.in ${PROJECT_BINARY_DIR}/coterie.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/coterie.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)

if(NOT TARGET coterie_cli)
  return()
endif()
install(TARGETS coterie_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)

# Completions and manual pages are what the program prints. They are written when it is installed, so
# that a build does not wait for them.
find_program(COTERIE_HELP2MAN help2man)
if(COTERIE_HELP2MAN)
  coterie_report("manual pages" in "")
else()
  coterie_report("manual pages" out "help2man was not found")
endif()
install(CODE "
  set(program \"$<TARGET_FILE:coterie_cli>\")
  set(help2man \"${COTERIE_HELP2MAN}\")
  set(version \"${PROJECT_VERSION}\")
  set(prefix \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
  set(data \"\${prefix}/${CMAKE_INSTALL_DATADIR}\")
  set(man \"\${prefix}/${CMAKE_INSTALL_MANDIR}/man1\")
  include(\"${PROJECT_SOURCE_DIR}/cmake/program_pages.cmake\")" COMPONENT runtime)
