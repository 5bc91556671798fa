#!/usr/bin/env bash
# Runs a compiler; what it prints lies beside its object then, as OBJECT.report, for compile_lane.py.
set -euo pipefail
previous=
for argument in "$@"; do
  if [[ $previous == -o ]]; then report=$argument.report; fi
  previous=$argument
done
status=0
"$@" >"$report" 2>&1 || status=$?
if ((status != 0)); then cat "$report" >&2; fi
exit "$status"
