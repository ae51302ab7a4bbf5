#!/bin/sh
# Runs a command over emulated CUDA, for example: EMULATED=.venv-emulated tests/emulated/run.sh python program.py
# EMULATED is the environment that `make test-emulated` makes, and the libraries are in build/emulated.
root=$(cd "$(dirname "$0")/../.." && pwd)
libraries=$root/build/emulated
PATH=${EMULATED:-$root/.venv-emulated}/bin:$PATH
PYTHONPATH=$root/tests/emulated/python:$root
LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
LD_PRELOAD=$libraries/libemulated_cuda.so
export PATH PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD
export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 EMULATED_DELAY_US="${EMULATED_DELAY_US-500}"
exec "$@"
