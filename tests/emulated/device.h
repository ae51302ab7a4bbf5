// Settings of the emulated devices, and what CUDA remembers for a host thread.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#define CUDA_API extern "C" __attribute__((visibility("default")))

namespace emulated {

int number_from_environment(const char* name, int otherwise);
int device_count();
// CUDA_VISIBLE_DEVICES numbers devices anew: the machine's number of one of this process's, and the other way around,
// -1 of one that this process does not see.
int on_machine(int device);
int in_process(int device);
size_t device_bytes();

struct HostThread {
    int device = 0;
    bool has_context = false;  // the runtime makes one current by itself; the driver's calls fail without
    cudaError_t last_error = cudaSuccess;
};
HostThread& host_thread();

// Every call of the runtime that needs a context starts with this.
void enter_runtime();

// Keeps an error for cudaGetLastError and passes it on.
cudaError_t noted(cudaError_t error);

// An error where the calling thread breaks what stands for another's capture; calls that are potentially unsafe ask.
cudaError_t unsafe_call();

}  // namespace emulated
