# The umbrella target and the package that find_package(hypershard) reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

get_property(hs_modules GLOBAL PROPERTY HS_MODULE_TARGETS)
get_property(hs_names GLOBAL PROPERTY HS_MODULE_NAMES)

# Test support is a component of its own: whoever wants it links hypershard::testing.
add_library(hs_umbrella INTERFACE)
add_library(hypershard::hypershard ALIAS hs_umbrella)
set_target_properties(hs_umbrella PROPERTIES EXPORT_NAME hypershard)
foreach(name IN LISTS hs_names)
  if(NOT name STREQUAL "testing")
    target_link_libraries(hs_umbrella INTERFACE hypershard::${name})
  endif()
endforeach()

install(
  TARGETS hs_umbrella ${hs_modules}
  EXPORT hypershardTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

# Compiled third-party libraries stay in the link lines of our static ones, so that a consumer
# has to find them again; header-only ones do not (see hs_module).
get_property(hs_packages GLOBAL PROPERTY HS_EXPORTED_PACKAGES)
list(REMOVE_DUPLICATES hs_packages)
set(HS_CONFIG_DEPENDENCIES "")
foreach(package IN LISTS hs_packages)
  string(APPEND HS_CONFIG_DEPENDENCIES "find_dependency(${package})\n")
endforeach()

set(hs_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hypershard")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/hypershardConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/hypershardConfig.cmake"
  INSTALL_DESTINATION "${hs_package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/hypershardConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/hypershardConfig.cmake"
        "${PROJECT_BINARY_DIR}/hypershardConfigVersion.cmake"
        "${PROJECT_SOURCE_DIR}/cmake/FindHypershardTorch.cmake"
        "${PROJECT_SOURCE_DIR}/cmake/FindHypershardSentencePiece.cmake"
  DESTINATION "${hs_package_dir}")
install(EXPORT hypershardTargets NAMESPACE hypershard:: DESTINATION "${hs_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
