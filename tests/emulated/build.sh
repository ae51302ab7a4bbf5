#!/bin/sh
# Builds the two libraries into build/emulated, with the headers of torch and of CUDA that the environment holds.
set -e
cd "$(dirname "$0")/../.."
libraries=build/emulated
packages=$("${EMULATED:-.venv-emulated}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$packages/torch
options="-std=c++17 -Wall -Wextra -fPIC -shared -fvisibility=hidden -pthread -isystem $packages/nvidia/cu13/include"
cuda="bridge device streams stream_calls memory copies symmetric launches nvml refused"
mkdir -p $libraries
${CXX:-g++} $options -O2 $(printf 'tests/emulated/%s.cpp ' $cuda) -o $libraries/libemulated_cuda.so -ldl
ln -sf libemulated_cuda.so $libraries/libcuda.so.1
ln -sf libemulated_cuda.so $libraries/libnvidia-ml.so.1
${CXX:-g++} $options -O1 -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    tests/emulated/operators.cpp tests/emulated/values.cpp -o $libraries/libemulated_operators.so \
    -L$libraries -lemulated_cuda -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda
