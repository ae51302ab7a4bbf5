// The driver's virtual memory, which torch's symmetric memory maps peers with: an allocation is a memory file.
//
// A handle exports as a file descriptor, torch passes that to its peers by its own socket, and they map the same pages,
// as on a device. Each rank's account counts only what it made itself, as if ranks that share a device had one each.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "device.h"
#include "memory.h"
#include "streams.h"

using namespace emulated;

namespace {
constexpr size_t GRANULARITY = 2 << 20;

struct Allocation {
    int file;
    size_t bytes;
    int device;
    bool made_here;      // rather than imported
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

int device_of(int file) {  // as its maker has named it
    char path[64] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    const ssize_t length = readlink(link.c_str(), path, sizeof path - 1);
    const std::string named(path, length > 0 ? size_t(length) : 0);
    const size_t dot = named.find("emulated.");
    return dot == std::string::npos ? host_thread().device : atoi(named.c_str() + dot + 9);
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
    const int file = memfd_create(("emulated." + std::to_string(device)).c_str(), MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes))) {
        if (file >= 0) close(file);
        return_bytes(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = handle_of(new Allocation{file, bytes, device, true});
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
    ++allocation->references;
    mappings[start] = allocation;
    add_range({start, bytes, Kind::device, allocation->device, false});
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc*, size_t) {
    protect(reinterpret_cast<void*>(start), bytes);
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    drain_device(host_thread().device);
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
    const int copy = dup(int(intptr_t(file)));
    if (copy < 0) return CUDA_ERROR_INVALID_VALUE;
    struct stat facts;
    if (fstat(copy, &facts)) {
        close(copy);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *handle = handle_of(new Allocation{copy, size_t(facts.st_size), device_of(copy), false});
    return CUDA_SUCCESS;
}
