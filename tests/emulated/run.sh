#!/bin/sh
# Runs a command over emulated CUDA, for example: TORCH=2.15.0 tests/emulated/run.sh python program.py
# `make test-emulated TORCH=2.15.0` makes what this needs: the environment, which EMULATED overrides, and the libraries.
root=$(cd "$(dirname "$0")/../.." && pwd)
TORCH=${TORCH:-2.11.0}
libraries=$root/build/emulated/$TORCH
PATH=${EMULATED:-$root/.venv-torch-$TORCH}/bin:$PATH
PYTHONPATH=$root/tests/emulated/python:$root
LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
LD_PRELOAD=$libraries/libemulated_cuda.so:$libraries/libemulated_nvshmem.so
export PATH PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD
export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 EMULATED_DELAY_US="${EMULATED_DELAY_US-500}"
exec "$@"
