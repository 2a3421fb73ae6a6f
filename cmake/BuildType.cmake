# The default build type, code generation flags and the linker.
# -g1 keeps line numbers in backtraces and costs a tenth of the compile time that -g does.
get_property(hs_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT CMAKE_BUILD_TYPE AND NOT hs_multi_config)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

if(PROJECT_IS_TOP_LEVEL AND CMAKE_CXX_FLAGS_RELWITHDEBINFO STREQUAL "-O2 -g -DNDEBUG")
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG" CACHE STRING "" FORCE)
endif()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Binaries of the build tree and of an installed tree find libtorch where the build found it.
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)

# Libraries and programs are both compiled with -fPIC: a precompiled header is only valid for
# the flags that it was made with, and the programs would get -fPIE instead.
set(HS_COMPILE_OPTIONS -fPIC "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")

set(HS_LINKER "the compiler's default")
set(HS_LINK_OPTIONS "")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12.1)
  set(HS_LINKER "the compiler's default (this GCC has no -fuse-ld=mold)")
elseif(HS_MOLD)
  find_program(HS_MOLD_PROGRAM mold)
  mark_as_advanced(HS_MOLD_PROGRAM)
  if(HS_MOLD_PROGRAM)
    set(HS_LINKER "mold")
    set(HS_LINK_OPTIONS -fuse-ld=mold)
  endif()
endif()
