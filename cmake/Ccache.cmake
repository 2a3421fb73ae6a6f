# Sends compilations through ccache, with the settings that make it useful here.
# GCC's precompiled headers need -fpch-preprocess and the pch_defines sloppiness to be cached at
# all; the base folder and the missing hash of the working folder let other build folders and
# other clones hit the same entries.
set(HS_CCACHE_STATE "off")
if(HS_CCACHE)
  find_program(HS_CCACHE_PROGRAM ccache)
  mark_as_advanced(HS_CCACHE_PROGRAM)
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    set(HS_CCACHE_STATE "left alone: CMAKE_CXX_COMPILER_LAUNCHER is set")
  elseif(HS_CCACHE_PROGRAM)
    set(HS_CCACHE_STATE "${HS_CCACHE_PROGRAM}")
    set(CMAKE_CXX_COMPILER_LAUNCHER
        "${CMAKE_COMMAND}" -E env
        "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
        "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
        "${HS_CCACHE_PROGRAM}")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      list(APPEND HS_COMPILE_OPTIONS -fpch-preprocess)
    endif()
  else()
    set(HS_CCACHE_STATE "not found")
  endif()
endif()
