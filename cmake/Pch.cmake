# Precompiled headers that all torch modules and all torch tests share: parsing ATen once costs
# some 16 s, and saves 3 to 8 s in every file after that. Off (HS_PCH=OFF) nothing else changes,
# so that a missing include shows.
set(HS_PCH_HEADERS <algorithm> <atomic> <chrono> <cstdint> <functional> <map> <memory> <mutex>
    <optional> <string> <string_view> <thread> <unordered_map> <utility> <vector> <ATen/ATen.h>)

function(hs_make_pch target)
  set(source "${PROJECT_BINARY_DIR}/pch/${target}.cpp")
  if(NOT EXISTS "${source}")
    file(WRITE "${source}" "// Empty: carries the precompiled header of ${target}.\n")
  endif()
  add_library(${target} STATIC EXCLUDE_FROM_ALL "${source}")
  hs_target_defaults(${target} TORCH)
  target_precompile_headers(${target} PRIVATE ${HS_PCH_HEADERS} ${ARGN})
endfunction()

# hs_use_pch(target [TEST]): call for torch targets after their defaults are set.
function(hs_use_pch target)
  if(NOT HS_PCH OR NOT HS_WITH_TORCH)
    return()
  endif()
  set(pch hs_pch)
  if("${ARGN}" MATCHES "TEST")
    set(pch hs_pch_test)
  endif()
  if(NOT TARGET ${pch})
    if(pch STREQUAL "hs_pch_test")
      hs_make_pch(${pch} <gtest/gtest.h>)
      target_link_libraries(${pch} PRIVATE GTest::gtest)
    else()
      hs_make_pch(${pch})
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
endfunction()
