# Shared start of the shell scripts: strict mode, the repository's root as working folder, and
# the few functions that every script prints and fails with. Source it, do not run it.
set -euo pipefail
HS_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$HS_ROOT"
HS_SCRIPT="$(basename "$0")"

say() { printf '[%s] %s\n' "$HS_SCRIPT" "$*"; }

die() {
  printf '[%s] error: %s\n' "$HS_SCRIPT" "$1" >&2
  if [ $# -gt 1 ]; then printf '  hint: %s\n' "$2" >&2; fi
  exit 1
}

# Prints the comment block at the top of the calling script: that is its --help.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//;t p;d;:p;p}' "$HS_ROOT/scripts/$HS_SCRIPT"; }

# Compilation jobs: one a core, but no more than memory allows (a large libtorch file takes 1.4 GiB).
jobs_for_memory() {
  local cores memory_gib jobs
  cores="$(nproc)"
  memory_gib="$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 4)"
  jobs=$((memory_gib * 2 / 3))
  if [ "$jobs" -gt "$cores" ]; then jobs="$cores"; fi
  if [ "$jobs" -lt 1 ]; then jobs=1; fi
  echo "$jobs"
}

# The python that holds (or will hold) torch and the development tools: the active one when pip
# may install into it, else the repository's own environment.
HS_VENV="$HS_ROOT/.venv"

active_python() {
  local name
  for name in python3 python; do
    if command -v "$name" >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
}

# Succeeds when pip may install into this python: a virtual environment, or a python that no
# distribution manages, with a folder that we may write.
pip_may_install() {
  "$1" - 2>/dev/null <<'PY'
import os, sys, sysconfig
import importlib.util
virtual = sys.prefix != sys.base_prefix
managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
writable = os.access(sysconfig.get_path("purelib"), os.W_OK)
has_pip = importlib.util.find_spec("pip") is not None
sys.exit(0 if (virtual or not managed) and writable and has_pip else 1)
PY
}
