#!/usr/bin/env bash
# Runs clang-tidy 18.1.8 on the C++ sources that differ from a base commit (7 to 20 s for a file on
# torch, so never on all of them unless asked).
#
# Usage: scripts/check_tidy.sh [--base COMMIT] [--limit N] [FILE...]
#   --base   what to compare with; default: the parent of HEAD, plus what is not committed
#   --limit  look at no more than N files (default 40), the smallest first; 0: no limit
. "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

base="" limit=40 files=()
while [ $# -gt 0 ]; do
  case "$1" in
    --base) base="${2:?--base needs a commit}"; shift ;;
    --limit) limit="${2:?--limit needs a number}"; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option '$1'" "scripts/check_tidy.sh --help lists them" ;;
    *) files+=("$1") ;;
  esac
  shift
done

tool=clang-tidy
if [ -x "$HS_VENV/bin/$tool" ]; then tool="$HS_VENV/bin/$tool"; fi
case "$("$tool" --version 2>/dev/null || true)" in
  *"version 18.1.8"*) ;;
  *) die "clang-tidy 18.1.8 is not installed" "scripts/bootstrap --dev installs it" ;;
esac

changed_files() {
  if [ -z "$base" ] && git rev-parse -q --verify HEAD^ >/dev/null; then base=HEAD^; fi
  { if [ -n "$base" ]; then git diff --name-only --diff-filter=d "$base" --; fi
    git diff --name-only --diff-filter=d HEAD -- 2>/dev/null || true
    git ls-files --others --exclude-standard; } | sort -u
}

if [ "${#files[@]}" = 0 ]; then
  mapfile -t files < <(changed_files | grep -E '^(hypershard|tools|tests|examples|benchmarks)/.*\.cpp$' || true)
fi
if [ "${#files[@]}" = 0 ]; then
  say "no changed sources"
  exit 0
fi

definitions=()
if [ -n "${HS_TORCH_ROOT:-}" ]; then definitions+=("-DHS_TORCH_ROOT=$HS_TORCH_ROOT"); fi
mkdir -p build-tidy
cmake --preset tidy "${definitions[@]}" >build-tidy/configure.log 2>&1 ||
  { cat build-tidy/configure.log >&2; die "configuring build-tidy failed"; }

# Only files that a target owns have compile commands (the consumer of tests/install has none).
mapfile -t files < <(python3 - "${files[@]}" <<'PY'
import json, os, sys
known = {os.path.relpath(entry["file"]) for entry in json.load(open("build-tidy/compile_commands.json"))}
print("\n".join(sorted((f for f in sys.argv[1:] if f in known), key=os.path.getsize)))
PY
)
if [ "$limit" -gt 0 ] && [ "${#files[@]}" -gt "$limit" ]; then
  say "${#files[@]} changed sources; looking at the $limit smallest (--limit 0 for all)"
  files=("${files[@]:0:$limit}")
fi
say "clang-tidy on ${#files[@]} files"
printf '%s\n' "${files[@]}" |
  xargs -P "$(nproc)" -n 1 "$tool" -p build-tidy --quiet 2>/dev/null ||
  die "clang-tidy found something" "scripts/check_tidy.sh FILE looks at one file again"
