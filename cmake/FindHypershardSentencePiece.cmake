# Finds SentencePiece, which distributions ship without a CMake package.
# Defines hypershard_deps::sentencepiece and HypershardSentencePiece_FOUND.
find_path(HypershardSentencePiece_INCLUDE_DIR sentencepiece_processor.h)
find_library(HypershardSentencePiece_LIBRARY sentencepiece)
find_library(HypershardSentencePiece_TRAIN_LIBRARY sentencepiece_train)
mark_as_advanced(HypershardSentencePiece_INCLUDE_DIR HypershardSentencePiece_LIBRARY
                 HypershardSentencePiece_TRAIN_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  HypershardSentencePiece REQUIRED_VARS HypershardSentencePiece_LIBRARY
                                        HypershardSentencePiece_TRAIN_LIBRARY
                                        HypershardSentencePiece_INCLUDE_DIR)

if(HypershardSentencePiece_FOUND AND NOT TARGET hypershard_deps::sentencepiece)
  add_library(hypershard_deps::sentencepiece UNKNOWN IMPORTED)
  set_target_properties(
    hypershard_deps::sentencepiece
    PROPERTIES IMPORTED_LOCATION "${HypershardSentencePiece_LIBRARY}"
               INTERFACE_LINK_LIBRARIES "${HypershardSentencePiece_TRAIN_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES "${HypershardSentencePiece_INCLUDE_DIR}")
endif()
