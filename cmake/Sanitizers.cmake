# Sanitizers for all our targets, from HS_SANITIZE. libtorch itself is not instrumented.
set(HS_SANITIZER_OPTIONS "")
if(HS_SANITIZE)
  string(REPLACE "," ";" hs_sanitizers "${HS_SANITIZE}")
  foreach(name IN LISTS hs_sanitizers)
    if(NOT name MATCHES "^(address|thread|undefined)$")
      message(FATAL_ERROR "HS_SANITIZE: unknown sanitizer '${name}' (expected a list of address, "
                          "thread, undefined)")
    endif()
  endforeach()
  if("address" IN_LIST hs_sanitizers AND "thread" IN_LIST hs_sanitizers)
    message(FATAL_ERROR "HS_SANITIZE: 'address' and 'thread' can not be used in one build; "
                        "hint: use two build folders (presets asan and tsan)")
  endif()
  list(JOIN hs_sanitizers "," hs_sanitizers)
  set(HS_SANITIZER_OPTIONS "-fsanitize=${hs_sanitizers}" -fno-omit-frame-pointer
                           -fno-sanitize-recover=all)
  # Instrumented code makes GCC see uninitialised members inside std::function and std::regex.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND HS_SANITIZER_OPTIONS -Wno-maybe-uninitialized)
  endif()
  # The vptr check wants type information that libtorch does not export.
  if("${hs_sanitizers}" MATCHES "undefined")
    list(APPEND HS_SANITIZER_OPTIONS -fno-sanitize=vptr)
  endif()
endif()
