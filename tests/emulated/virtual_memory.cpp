// The driver's virtual memory: an allocation is a memory file.
//
// A handle exports as a file descriptor; processes to which that is passed map the same pages, as on a device. Each rank's account counts only what it made itself, as if ranks that share a device had one each.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "device.h"
#include "memory.h"
#include "record.h"

using namespace emulated;

namespace {
constexpr size_t GRANULARITY = 2 << 20;

struct Allocation {
    int file;
    size_t bytes;
    int device;
    bool made_here;      // rather than imported
    bool gpudirect;
    int references = 1;  // handles and mappings
};

std::mutex lock;                             // of the map and of every allocation's count
std::map<CUdeviceptr, Allocation*> mappings;  // by where they start

using Handle = CUmemGenericAllocationHandle;
Allocation* allocation_of(Handle handle) { return reinterpret_cast<Allocation*>(handle); }
Handle handle_of(Allocation* allocation) { return reinterpret_cast<Handle>(allocation); }

void give_up(Allocation* allocation) {  // one reference, by holders of the lock
    if (--allocation->references > 0) return;
    close(allocation->file);
    if (allocation->made_here) return_bytes(allocation->device, allocation->bytes);
    delete allocation;
}

// A memory file's name says what whoever imports it must know.
std::string name_of(int device, bool gpudirect) {
    return "emulated." + std::to_string(device) + (gpudirect ? ".gpudirect" : "");
}

std::string name_of(int file) {  // "/memfd:emulated.0 (deleted)"; empty for another kind of file
    char path[64] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    const ssize_t length = readlink(link.c_str(), path, sizeof path - 1);
    const std::string named(path, length > 0 ? size_t(length) : 0);
    const size_t dot = named.find("emulated.");
    return dot == std::string::npos ? "" : named.substr(dot + 9);
}

bool reserve_at(void* where, size_t bytes) {  // addresses that nobody may touch, in place of what is mapped there
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(where, bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}
}  // namespace

CUDA_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                CUmemAllocationGranularity_flags) {
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemCreate(Handle* handle, size_t bytes, const CUmemAllocationProp* asked, unsigned long long) {
    if (bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    if (asked->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_PERMITTED;
    const int device = asked->location.id;
    if (!take_bytes(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    const bool gpudirect = asked->allocFlags.gpuDirectRDMACapable;
    const int file = memfd_create(name_of(on_machine(device), gpudirect).c_str(), MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes))) {
        if (file >= 0) close(file);
        return_bytes(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = handle_of(new Allocation{file, bytes, device, true, gpudirect});
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemRelease(Handle handle) {
    std::lock_guard<std::mutex> held(lock);
    give_up(allocation_of(handle));
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t alignment, CUdeviceptr,
                                      unsigned long long) {
    if (alignment == 0) alignment = GRANULARITY;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* found = mmap(nullptr, bytes + alignment, PROT_NONE, flags, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto first = uintptr_t(found), aligned = (first + alignment - 1) / alignment * alignment;
    if (aligned > first) munmap(found, aligned - first);
    munmap(reinterpret_cast<void*>(aligned + bytes), first + alignment - aligned);
    *start = aligned;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    munmap(reinterpret_cast<void*>(start), bytes);
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, Handle handle, unsigned long long) {
    std::lock_guard<std::mutex> held(lock);
    Allocation* allocation = allocation_of(handle);
    if (offset + bytes > allocation->bytes) return CUDA_ERROR_INVALID_VALUE;
    void* where = reinterpret_cast<void*>(start);
    if (mmap(where, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->file, off_t(offset)) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct stat facts;
    if (fstat(allocation->file, &facts) == 0) record::mapped(where, bytes, facts.st_ino, offset);
    ++allocation->references;
    mappings[start] = allocation;
    add_range({start, bytes, Kind::device, allocation->device, false, allocation->gpudirect});
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc* access, size_t) {
    protect(reinterpret_cast<void*>(start), bytes, access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return CUDA_SUCCESS;
}

// Waits for no stream: one that comes to work on what was unmapped dies.
CUDA_API CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.extract(start);
    if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
    remove_range(reinterpret_cast<void*>(start));
    give_up(found.mapped());
    return reserve_at(reinterpret_cast<void*>(start), bytes) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUDA_API CUresult cuMemRetainAllocationHandle(Handle* handle, void* start) {
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.find(CUdeviceptr(start));
    if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    ++found->second->references;
    *handle = handle_of(found->second);
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, Handle handle) {
    *properties = {};
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties->location.id = allocation_of(handle)->device;
    properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemExportToShareableHandle(void* file, Handle handle, CUmemAllocationHandleType type,
                                               unsigned long long) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    const int copy = dup(allocation_of(handle)->file);
    *static_cast<int*>(file) = copy;
    return copy < 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUDA_API CUresult cuMemImportFromShareableHandle(Handle* handle, void* file, CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    if (name_of(int(intptr_t(file))).empty()) return CUDA_ERROR_INVALID_VALUE;
    const int copy = fcntl(int(intptr_t(file)), F_DUPFD_CLOEXEC, 0);
    struct stat facts;
    if (copy < 0 || fstat(copy, &facts)) {
        close(copy);
        return CUDA_ERROR_INVALID_VALUE;
    }
    const std::string name = name_of(copy);
    const bool gpudirect = name.find("gpudirect") != std::string::npos;
    const int device = in_process(std::atoi(name.c_str()));
    *handle = handle_of(new Allocation{copy, size_t(facts.st_size), device, false, gpudirect});
    return CUDA_SUCCESS;
}
