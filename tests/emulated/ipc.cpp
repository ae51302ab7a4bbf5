// CUDA's handles of one process's memory and events: the memory becomes a memory file, which others open by its process.
//
// As on a device, a process cannot open its own handles, and memory is named by where its allocation starts. An event's
// handle is given once the event has been reached, later than a device would: who opens it never waits.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"
#include "memory.h"
#include "record.h"
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

std::mutex lock;  // of the map
std::map<uintptr_t, int> files;  // of exported memory, by where it starts

void* map_file(void* where, size_t bytes, int file) {
    void* start = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (where ? MAP_FIXED : 0), file, 0);
    struct stat facts;
    if (start == MAP_FAILED || fstat(file, &facts)) return nullptr;
    record::mapped(start, bytes, facts.st_ino, 0);
    protect(start, bytes);
    return start;
}

int file_of(const Range& range) {  // at first, the memory's content moves there; -1 on failure
    std::lock_guard<std::mutex> held(lock);
    if (auto found = files.find(range.start); found != files.end()) return found->second;
    void* start = reinterpret_cast<void*>(range.start);
    drain_all();
    const int file = memfd_create("emulated.ipc", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(range.bytes))) return -1;
    allow_device_memory(true);
    const bool written = pwrite(file, start, range.bytes, 0) == ssize_t(range.bytes);
    allow_device_memory(false);
    if (!written || !map_file(start, range.bytes, file)) return -1;
    return files[range.start] = file;
}
}  // namespace

void emulated::exported_no_more(const void* start) {
    std::lock_guard<std::mutex> held(lock);
    if (auto found = files.extract(uintptr_t(start))) close(found.mapped());
}

CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* start) {
    enter_runtime();
    auto range = range_of(start);
    if (!range || !range->allocated || range->kind != Kind::device) return noted(cudaErrorInvalidValue);
    const int file = file_of(*range);
    if (file < 0) return noted(cudaErrorMemoryAllocation);
    const Exported exported{getpid(), file, range->device, range->bytes};
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
    *start = map_file(nullptr, exported.bytes, file);
    close(file);
    if (!*start) return noted(cudaErrorMemoryAllocation);
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
