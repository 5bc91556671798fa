#!/usr/bin/env bash
# Makes .venv hold exactly what a lock lists:  .ci/make_env.sh .ci/locks/cpu.txt
#
# Quick and silent when it already does. .venv/ready names the lock that was installed and is written
# last, so an environment that is outdated, half installed or whose Python is gone is made anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=$1
wanted=$(sha256sum "$lock")

# Two makes in one checkout: the second waits, then finds the work done.
exec 9<"$lock"
flock 9

if [[ "$(cat .venv/ready 2>/dev/null)" == "$wanted" ]] && .venv/bin/python -c '' 2>/dev/null; then
  exit 0
fi

# Newer releases come last: a package may not have a wheel for them yet.
candidates() {
  local name root
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" || true
  done
  for root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null)" ~/.pyenv; do
    for name in 3.12 3.13 3.14; do
      printf '%s\n' "$root"/versions/"$name"*/bin/python3
    done
  done
}

# Trying is the only proof: a name on PATH may be a shim for a version that is not there.
works() {
  timeout 30 "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))'
}

python=
while read -r candidate; do
  if works "$candidate" >/dev/null 2>&1 </dev/null; then
    python=$candidate
    break
  fi
done < <(candidates)
if [[ -z $python ]]; then
  echo "No Python >= 3.12 that runs was found, on PATH or under pyenv. Install one, or name one whose" \
    "environment has the packages of $lock: make PYTHON=/path/to/python" >&2
  exit 1
fi

echo "Making .venv from $lock with $("$python" --version)"
"$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
  --require-hashes --only-binary :all: --requirement "$lock"
printf '%s\n' "$wanted" >.venv/ready
