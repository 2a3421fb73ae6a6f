# Finds libtorch in the Python package `torch`, without importing it and without its own
# TorchConfig.cmake (a CUDA package's wants a whole CUDA toolkit even for a program that uses none).
#
# Looks in HS_TORCH_ROOT (the folder with include/ and lib/) when set, else in the active python3,
# else in the project's own .venv. Defines
#   hypershard_torch::torch       headers and the libraries torch, torch_cpu, c10
#   HypershardTorch_VERSION, HypershardTorch_ROOT, HypershardTorch_FOUND_BY
set(HypershardTorch_MIN 2.11)
set(HypershardTorch_END 2.15)

# Asks one interpreter where its torch package is; empty when it has none.
function(_hs_ask_python python out)
  set(ask "import importlib.util as u
s = u.find_spec('torch')
print(list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else '')")
  execute_process(
    COMMAND "${python}" -c "${ask}"
    WORKING_DIRECTORY /
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

# Sets HypershardTorch_ROOT and _FOUND_BY. A python whose torch is too old or too new is passed
# over while another one is left to ask.
function(_hs_locate_torch)
  if(HS_TORCH_ROOT)
    set(HypershardTorch_ROOT "${HS_TORCH_ROOT}" PARENT_SCOPE)
    set(HypershardTorch_FOUND_BY "HS_TORCH_ROOT" PARENT_SCOPE)
    return()
  endif()
  find_program(python NAMES python3 python NO_CACHE)
  set(asked "")
  set(root "")
  set(found_by "")
  foreach(candidate "${python}" "${PROJECT_SOURCE_DIR}/.venv/bin/python3")
    if(candidate AND EXISTS "${candidate}")
      list(APPEND asked "${candidate}")
      _hs_ask_python("${candidate}" folder)
      if(folder)
        _hs_read_torch_version("${folder}" version)
        _hs_is_supported("${version}" supported)
        if(supported OR NOT root)
          set(root "${folder}")
          set(found_by "${candidate}")
        endif()
        if(supported)
          break()
        endif()
      endif()
    endif()
  endforeach()
  if(NOT root)
    list(JOIN asked " nor in " asked)
    set(found_by "not in ${asked}")
  endif()
  set(HypershardTorch_ROOT "${root}" PARENT_SCOPE)
  set(HypershardTorch_FOUND_BY "${found_by}" PARENT_SCOPE)
endfunction()

function(_hs_is_supported version out)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" number "${version}")
  set(${out} FALSE PARENT_SCOPE)
  if(number AND NOT number VERSION_LESS HypershardTorch_MIN
     AND number VERSION_LESS HypershardTorch_END)
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Reads the version from the Python package, else from the C++ headers (libtorch archives).
function(_hs_read_torch_version root out)
  set(version "")
  set(header "${root}/include/torch/csrc/api/include/torch/version.h")
  if(EXISTS "${root}/version.py")
    file(STRINGS "${root}/version.py" line REGEX "^__version__ *=")
    string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[^'\"]*" version "${line}")
  elseif(EXISTS "${header}")
    file(STRINGS "${header}" line REGEX "define TORCH_VERSION ")
    string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${line}")
  endif()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# Reads which ABI of libstdc++ the package was built with; every supported wheel uses the new one.
function(_hs_read_torch_abi root out)
  set(abi 1)
  set(config "${root}/share/cmake/Torch/TorchConfig.cmake")
  if(EXISTS "${config}")
    file(STRINGS "${config}" line REGEX "_GLIBCXX_USE_CXX11_ABI=0")
    if(line)
      set(abi 0)
    endif()
  endif()
  set(${out} ${abi} PARENT_SCOPE)
endfunction()

function(_hs_make_torch_targets root abi)
  set(includes "${root}/include" "${root}/include/torch/csrc/api/include")
  add_library(hypershard_torch::torch INTERFACE IMPORTED)
  # libtorch.so of 2.11 exports an old std::filesystem that crashes; libstdc++ must be asked first.
  if(HypershardTorch_VERSION VERSION_LESS 2.12)
    target_link_libraries(
      hypershard_torch::torch
      INTERFACE "-Wl,--push-state,--no-as-needed,-lstdc++,--pop-state")
  endif()
  set_target_properties(hypershard_torch::torch PROPERTIES INTERFACE_COMPILE_FEATURES cxx_std_20)
  target_include_directories(hypershard_torch::torch SYSTEM INTERFACE ${includes})
  target_compile_definitions(hypershard_torch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${abi})
  foreach(name torch torch_cpu c10)
    add_library(hypershard_torch::lib${name} SHARED IMPORTED)
    set_target_properties(hypershard_torch::lib${name}
                          PROPERTIES IMPORTED_LOCATION "${root}/lib/lib${name}.so")
    target_link_libraries(hypershard_torch::torch INTERFACE hypershard_torch::lib${name})
  endforeach()
  find_package(Threads QUIET)
  target_link_libraries(hypershard_torch::torch INTERFACE Threads::Threads)
endfunction()

_hs_locate_torch()
set(_hs_problem "")
if(NOT HypershardTorch_ROOT)
  string(CONCAT _hs_problem
      "no torch package was found (${HypershardTorch_FOUND_BY}); hint: run scripts/bootstrap, or "
      "activate the environment that has torch, or pass -DHS_TORCH_ROOT=<folder of the package>")
else()
  _hs_read_torch_version("${HypershardTorch_ROOT}" HypershardTorch_VERSION)
  if(NOT EXISTS "${HypershardTorch_ROOT}/lib/libtorch_cpu.so"
     OR NOT EXISTS "${HypershardTorch_ROOT}/include/ATen/ATen.h")
    string(CONCAT _hs_problem
        "'${HypershardTorch_ROOT}' (from ${HypershardTorch_FOUND_BY}) is no torch package: it lacks "
        "lib/libtorch_cpu.so or include/ATen/ATen.h")
  elseif(NOT HypershardTorch_VERSION)
    string(CONCAT _hs_problem "'${HypershardTorch_ROOT}' has neither a version.py nor torch/version.h")
  else()
    _hs_is_supported("${HypershardTorch_VERSION}" _hs_supported)
    if(NOT _hs_supported)
      string(CONCAT _hs_problem
          "found torch ${HypershardTorch_VERSION} at '${HypershardTorch_ROOT}' (from "
          "${HypershardTorch_FOUND_BY}), expected 2.11 to 2.14; hint: pip install torch==2.13.0, or "
          "pass -DHS_TORCH_ROOT=<folder of a supported package>")
    endif()
  endif()
endif()

if(_hs_problem)
  set(HypershardTorch_FOUND FALSE)
  if(HypershardTorch_FIND_REQUIRED)
    message(FATAL_ERROR "torch: ${_hs_problem}")
  elseif(NOT HypershardTorch_FIND_QUIETLY)
    message(STATUS "torch: ${_hs_problem}")
  endif()
else()
  set(HypershardTorch_FOUND TRUE)
  if(NOT TARGET hypershard_torch::torch)
    _hs_read_torch_abi("${HypershardTorch_ROOT}" _hs_abi)
    _hs_make_torch_targets("${HypershardTorch_ROOT}" ${_hs_abi})
  endif()
endif()
unset(_hs_problem)
unset(_hs_supported)
unset(_hs_abi)
