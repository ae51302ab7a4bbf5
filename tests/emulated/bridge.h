// What the operators, a library of their own that is linked with torch, and Python call of the emulated CUDA.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

extern "C" {
// Puts work at the end of a stream's queue; `run` gets `data`, once, on the stream's thread.
void emulated_enqueue(cudaStream_t stream, int device, void (*run)(void*), void* data);
// As that, for a kernel of odc's.
void emulated_launch(cudaStream_t stream, int device, void (*run)(void*), void* data);
// Returns when the stream has done all that it was given so far.
void emulated_drain(cudaStream_t stream, int device);
// Returns when all streams have.
void emulated_drain_all();
// On a stream's thread: returns never, as work that a peer does not finish. The process may end nevertheless.
void emulated_hang();
// Whether the calling thread may touch device memory.
void emulated_allow(int allowed);
// Of the work that is enqueued next by this thread: what it is, and bytes that it reads (0) or writes (1).
void emulated_named(const char* name);
void emulated_touches(const void* start, size_t bytes, int written);
// A block of torch's allocator is given out (1) or back (0) by the calling thread.
void emulated_block(const void* start, size_t bytes, int given_out);
// Whether what this process does is recorded.
int emulated_records();
// 1: from now on nothing of this thread is recorded; -1: as before.
void emulated_quiet(int more);
// Whether other threads of the host may not: 0 on processors without protection keys.
int emulated_protects();
}
