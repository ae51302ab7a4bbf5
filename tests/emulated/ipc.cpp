// CUDA's handles of one process's memory and events: memory is a memory file, which others open by its process.
//
// As on a device, a process cannot open its own handles, and memory is named by where its allocation starts. An event's
// handle is given once the event has been reached, later than a device would: who opens it never waits.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "device.h"
#include "memory.h"
#include "streams.h"

using namespace emulated;

namespace {
struct Exported {  // what a handle holds
    pid_t process;
    int file;
    int device;
    size_t bytes;
};
static_assert(sizeof(Exported) <= sizeof(cudaIpcMemHandle_t));
}  // namespace

CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* start) {
    enter_runtime();
    auto range = range_of(start);
    if (!range || range->file < 0) return noted(cudaErrorInvalidValue);
    const Exported exported{getpid(), range->file, range->device, range->bytes};
    *handle = {};
    std::memcpy(handle, &exported, sizeof exported);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaIpcOpenMemHandle(void** start, cudaIpcMemHandle_t handle, unsigned) {
    enter_runtime();
    Exported exported;
    std::memcpy(&exported, &handle, sizeof exported);
    if (exported.process == getpid()) return noted(cudaErrorInvalidResourceHandle);
    const std::string path = "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return noted(cudaErrorInvalidResourceHandle);
    *start = map_file(file, exported.bytes);
    close(file);
    if (!*start) return noted(cudaErrorMemoryAllocation);
    protect(*start, exported.bytes);
    add_range({uintptr_t(*start), exported.bytes, Kind::device, exported.device, false});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaIpcCloseMemHandle(void* start) {
    enter_runtime();
    drain_all();
    auto range = remove_range(start);
    if (!range) return noted(cudaErrorInvalidValue);
    munmap(start, range->bytes);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
    *handle = {};
    return cudaEventSynchronize(event);
}

CUDA_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) { return cudaEventCreate(event); }
