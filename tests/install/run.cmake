# Installs the build into a prefix of its own, configures the consumer project against it, builds
# and runs it. Any failing step fails the test with the step's own output.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "install.consumer: exit code ${code} from: ${command}")
  endif()
endfunction()

set(work "${HS_BUILD}/install_test")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

run("${CMAKE_COMMAND}" --install "${HS_BUILD}" --prefix "${work}/prefix" --config "${HS_CONFIG}")

set(launcher "")
if(HS_LAUNCHER)
  set(launcher "-DCMAKE_CXX_COMPILER_LAUNCHER=${HS_LAUNCHER}")
endif()

# No header may be left behind: what is installed must be enough to compile against.
run("${CMAKE_COMMAND}" -S "${HS_CONSUMER}/consumer" -B "${work}/build" -G "${HS_GENERATOR}"
    "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DCMAKE_CXX_COMPILER=${HS_COMPILER}"
    "-DCMAKE_BUILD_TYPE=${HS_CONFIG}" "-DMODULES=${HS_MODULES}"
    "-DEXAMPLE=${HS_EXAMPLE}"
    ${launcher})
run("${CMAKE_COMMAND}" --build "${work}/build" --config "${HS_CONFIG}")
run("${CMAKE_CTEST_COMMAND}" --test-dir "${work}/build" --output-on-failure --no-tests=error -C
    "${HS_CONFIG}")
file(REMOVE_RECURSE "${work}")
