# SPDX-License-Identifier: MIT
# cmake -DPROGRAM=... -DCUOBJDUMP=... -DQUICK=... -P run.cmake: tells test_rehearsal what its kernels need.
execute_process(COMMAND ${CUOBJDUMP} --dump-resource-usage ${PROGRAM} OUTPUT_FILE ${PROGRAM}.uses
  RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "cuobjdump cannot read ${PROGRAM}")
endif()
set(ENV{COTERIE_KERNEL_USES} ${PROGRAM}.uses)
if(QUICK)
  set(ENV{COTERIE_KERNELS_QUICK} 1)
endif()
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "a kernel does not fit")
endif()
