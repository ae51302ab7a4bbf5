// What the operators, a library of their own that is linked with torch, call of the emulated CUDA.
#pragma once
#include <cuda_runtime_api.h>

extern "C" {
// Puts work at the end of a stream's queue; `run` gets `data`, once, on the stream's thread.
void emulated_enqueue(cudaStream_t stream, int device, void (*run)(void*), void* data);
// Returns when the stream has done all that it was given so far.
void emulated_drain(cudaStream_t stream, int device);
// Whether the calling thread may touch device memory.
void emulated_allow(int allowed);
// Whether other threads of the host may not: 0 on processors without protection keys.
int emulated_protects();
}
