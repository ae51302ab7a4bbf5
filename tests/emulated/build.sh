#!/bin/sh
# Builds the three libraries into build/emulated/$TORCH, with the headers of torch and of CUDA that the environment holds.
set -e
cd "$(dirname "$0")/../.."
TORCH=${TORCH:-2.11.0}
libraries=build/emulated/$TORCH
packages=$("${EMULATED:-.venv-torch-$TORCH}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$packages/torch
options="-std=c++20 -Wall -Wextra -fPIC -shared -fvisibility=hidden -pthread -isystem $packages/nvidia/cu13/include"
cuda="bridge capture device links python_lock streams stream_calls memory addresses copies batches record virtual_memory ipc launches lookups refused"
mkdir -p "$libraries"
${CXX:-g++} $options -O2 $(printf 'tests/emulated/%s.cpp ' $cuda) -o "$libraries/libemulated_cuda.so" -ldl
ln -sf libemulated_cuda.so "$libraries/libcuda.so.1"
${CXX:-g++} $options -O2 -isystem "$packages/nvidia/nvshmem/include" tests/emulated/nvshmem.cpp \
    -o "$libraries/libemulated_nvshmem.so" -L"$libraries" -lemulated_cuda
${CXX:-g++} $options -O1 -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    tests/emulated/operators.cpp tests/emulated/values.cpp -o "$libraries/libemulated_operators.so" \
    -L"$libraries" -lemulated_cuda -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda
