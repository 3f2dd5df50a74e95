#!/bin/sh
# Everything that tests and benchmarks show on a GPU, in one call of eight minutes: see docs/gpu.md.
#   gpu/run.sh [--dry] [--seconds 460] [--only WORD]
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python3}" -u gpu/steps.py --out "${OUT:-gpu/out}" "$@"
