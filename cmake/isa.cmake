# SPDX-License-Identifier: MIT
# CPU kernels are compiled once per instruction set, each time into a separate namespace
# (COTERIE_ISA); src/cpu chooses one of them at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(COTERIE_ARCHITECTURE x86)
  set(COTERIE_ISAS baseline avx2 avx512 avx512_bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(COTERIE_ARCHITECTURE arm)
  set(COTERIE_ISAS neon)
else()
  message(FATAL_ERROR
    "The CPU kernels are written for x86-64 and 64-bit ARM; this is ${CMAKE_SYSTEM_PROCESSOR}.")
endif()
set(COTERIE_ISA_FLAGS_baseline "")  # plain x86-64
set(COTERIE_ISA_FLAGS_neon "")  # in every 64-bit ARM processor
set(COTERIE_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mpopcnt)
set(COTERIE_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vpopcntdq -mavx512ifma
  -mfma -mf16c -mpopcnt -mprefer-vector-width=512)
set(COTERIE_ISA_FLAGS_avx512_bf16 ${COTERIE_ISA_FLAGS_avx512} -mavx512bf16)

# coterie_isa_libraries(<name> <sources>...): object libraries <name>_<isa>, one per COTERIE_ISAS.
function(coterie_isa_libraries name)
  foreach(isa IN LISTS COTERIE_ISAS)
    add_library(${name}_${isa} OBJECT ${ARGN})
    target_link_libraries(${name}_${isa} PRIVATE coterie_room)
    target_compile_definitions(${name}_${isa} PRIVATE COTERIE_ISA=${isa})
    # Without errno and traps g++ can vectorise; -ffast-math would give up NaN, -inf and the order of
    # sums, which the numerics rely on.
    target_compile_options(${name}_${isa} PRIVATE ${COTERIE_KERNEL_OPTIMIZE} -fno-math-errno
      -fno-trapping-math ${COTERIE_ISA_FLAGS_${isa}})
  endforeach()
endfunction()
