#!/usr/bin/env bash
# Checks that every C++ file is formatted by clang-format 18.1.8.
#
# Usage: scripts/check_format.sh [--fix] [--if-installed] [FILE...]
#   --fix           format the files instead
#   --if-installed  succeed with a note when the formatter is missing
. "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

fix=0 optional=0 files=()
for argument in "$@"; do
  case "$argument" in
    --fix) fix=1 ;;
    --if-installed) optional=1 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option '$argument'" "scripts/check_format.sh --help lists them" ;;
    *) files+=("$argument") ;;
  esac
done

tool=clang-format
if [ -x "$HS_VENV/bin/$tool" ]; then tool="$HS_VENV/bin/$tool"; fi
case "$("$tool" --version 2>/dev/null || true)" in
  *"version 18.1.8"*) ;;
  *)
    if [ "$optional" = 1 ]; then
      say "skipped: clang-format 18.1.8 is not installed (scripts/bootstrap --dev installs it)"
      exit 0
    fi
    die "clang-format 18.1.8 is not installed" "scripts/bootstrap --dev installs it"
    ;;
esac

if [ "${#files[@]}" = 0 ]; then
  mapfile -t files < <(python3 scripts/source_tree.py)
fi
if [ "${#files[@]}" = 0 ]; then exit 0; fi
if [ "$fix" = 1 ]; then
  "$tool" -i "${files[@]}"
  say "formatted ${#files[@]} files"
elif ! findings="$("$tool" --dry-run -Werror "${files[@]}" 2>&1)"; then
  grep -E '^[^ :]+:[0-9]+:[0-9]+: error' <<<"$findings" | cut -d: -f1 | sort -u |
    sed 's/$/: not formatted/'
  die "some files are not formatted" "scripts/check_format.sh --fix formats them"
else
  say "${#files[@]} files are formatted"
fi
