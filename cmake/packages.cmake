# SPDX-License-Identifier: MIT
# Libraries of the parts above the core. A part whose library is missing is not built and reports that.
if(NOT COTERIE_APPS AND NOT COTERIE_TESTS)
  return()
endif()

foreach(package CLI11 fmt nlohmann_json LibArchive)
  find_package(${package} QUIET)
  if(${package}_FOUND)
    coterie_report(${package} in "version ${${package}_VERSION}")
  else()
    coterie_report(${package} out "was not found; scripts/setup installs it")
  endif()
endforeach()

# Sets `out` to the packages that were not found.
function(coterie_missing_packages out)
  set(missing)
  foreach(package IN LISTS ARGN)
    if(NOT ${package}_FOUND)
      list(APPEND missing ${package})
    endif()
  endforeach()
  list(JOIN missing ", " missing)
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()
