# Checks once per torch version that c10d::ProcessGroupGloo can be used with the declarations in
# hypershard/comm/c10d/gloo_decl, since the torch package exports the class but ships no gloo
# headers. Defines hypershard_torch::gloo_decl (PRIVATE use: comm's c10d adapter only).
if(NOT HS_WITH_TORCH)
  return()
endif()

set(HS_GLOO_DECL_DIR "${PROJECT_SOURCE_DIR}/hypershard/comm/c10d/gloo_decl")
add_library(hypershard_torch::gloo_decl INTERFACE IMPORTED)
target_include_directories(hypershard_torch::gloo_decl SYSTEM INTERFACE "${HS_GLOO_DECL_DIR}")
target_compile_definitions(hypershard_torch::gloo_decl INTERFACE USE_C10D_GLOO)

if(NOT "${HS_GLOO_CHECKED_FOR}" STREQUAL "${HypershardTorch_ROOT} ${HypershardTorch_VERSION}")
  message(STATUS "Checking that c10d::ProcessGroupGloo compiles and links")
  try_compile(
    HS_GLOO_WORKS "${PROJECT_BINARY_DIR}/gloo_check"
    SOURCES "${PROJECT_SOURCE_DIR}/cmake/gloo_check.cpp"
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${HS_GLOO_DECL_DIR}"
                "-DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}"
    COMPILE_DEFINITIONS -DUSE_C10D_GLOO -DFMT_HEADER_ONLY=1
    LINK_LIBRARIES hypershard_torch::torch
    CXX_STANDARD 20
    CXX_STANDARD_REQUIRED ON
    OUTPUT_VARIABLE hs_gloo_output)
  if(NOT HS_GLOO_WORKS)
    message(
      FATAL_ERROR
        "c10d::ProcessGroupGloo of torch ${HypershardTorch_VERSION} does not work with the "
        "declarations in '${HS_GLOO_DECL_DIR}'; hint: compare them with ProcessGroupGloo.hpp of "
        "this torch. The compiler said:\n${hs_gloo_output}")
  endif()
  message(STATUS "Checking that c10d::ProcessGroupGloo compiles and links - yes")
  set(HS_GLOO_CHECKED_FOR "${HypershardTorch_ROOT} ${HypershardTorch_VERSION}"
      CACHE INTERNAL "The torch that the gloo check passed with")
endif()
