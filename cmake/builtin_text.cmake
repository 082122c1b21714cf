# SPDX-License-Identifier: MIT
# cmake -DROOT=repository -DLIST=file with names -DOUT=source -P cmake/builtin_text.cmake writes a C++
# source that contains the text of all listed files, each after a line with its name.
file(READ ${LIST} names)
set(mark coterie_text)  # delimits the raw string literals

set(source "// Made from the repository by cmake/builtin_text.cmake.\n#include <string_view>\n")
string(APPEND source "namespace coterie::train {\n")
string(APPEND source "extern const std::string_view kBuiltinText;\n")
string(APPEND source "using std::string_view_literals::operator\"\"sv;\n")
string(APPEND source "const std::string_view kBuiltinText =\n")
foreach(name IN LISTS names)
  file(READ ${ROOT}/${name} text)
  if(text MATCHES "\\)${mark}\"")
    message(FATAL_ERROR "${name} contains the delimiter of the built-in text, )${mark}\"")
  endif()
  string(APPEND source "R\"${mark}(=== ${name} ===\n${text}\n)${mark}\"\n")
endforeach()
string(APPEND source "\"\"sv;\n}  // namespace coterie::train\n")
file(WRITE ${OUT} "${source}")
