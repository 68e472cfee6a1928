#!/usr/bin/env bash
# Checks and measures everything on one NVIDIA card (made for an H200): parity, capture, step times, memory, a peer.
#
# At home, once, into a folder that git ignores; the card's machine has torch, triton, numba and pytest, but no optree:
#
#   for v in 2_28 2_27 2_17; do set -- "$@" --platform manylinux_${v}_x86_64; done
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "$@" \
#     -d build/wheels optree==0.20.0 gefen-x==0.5.0
#
# gefen-x may be left out; the report then says that it was not measured. Keep one version of each wheel there.
# On the card, from the root of the repository, `build/wheels` being carried along, with 500 seconds of time:
#
#   bash tests/device/run.sh
#
# that is, through the device tool: run(command="bash tests/device/run.sh", carry=["build/wheels"], timeout_s=500).
# It takes under 8 minutes (`--limit` seconds, 440, for all sections), shows what it does, stops at no failure, and
# writes report.md, report.json and log.txt into $OUT (without it, into a new temporary folder). To keep a report, copy
# it from there into tests/device/. `--sections a,b` runs some only: `--list` names them.
# `--dry` needs no card: tiny sizes, kernels by triton's interpreter, and "not run" for what only a card can tell.
# It ends with 0 if no check failed. What is skipped counts as not run, never as passed.
set -u
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [[ " $* " != *" --dry "* ]] && compgen -G "build/wheels/*.whl" >/dev/null; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" build/wheels/*.whl &&
    export PYTHONPATH=$site:$PYTHONPATH
fi
exec "$python" -m tests.device --out "${OUT:-$(mktemp -d)}" "$@"
