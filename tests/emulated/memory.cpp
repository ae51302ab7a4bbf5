// Memory of the device is memory of the host under a protection key that only threads of streams hold.
//
// Each thread has its own rights, so a stream works while the host is kept out, at no cost per access. On processors
// without protection keys (Intel servers have them since 2017, AMD since 2020) memory is not protected, and the header
// of the test session says so. New memory is filled with a pattern, so that no test passes on zeros that nobody wrote.
#include "memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "record.h"
#include "streams.h"

namespace emulated {

namespace {
constexpr size_t PAGE = 4096;
constexpr int PATTERN = 0xa5;                // a large negative number as fp32, bf16 or an integer
constexpr size_t LARGEST_FILLED = 256 << 20;  // beyond, memory stays untouched (and zero): a host may have less

std::mutex lock;  // of the two below
std::map<uintptr_t, Range> ranges;
std::map<int, size_t> taken;  // bytes, by device

int protection_key() {  // -1 without
    static const int key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    return key;
}

size_t whole_pages(size_t bytes) { return (bytes + PAGE) / PAGE * PAGE; }  // at least one

void* map_memory(size_t bytes) {
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? nullptr : start;
}

cudaError_t free_allocated(void* start, Kind kind) {
    enter_runtime();
    if (!start) return cudaSuccess;
    auto range = range_of(start);
    if (!range || range->start != uintptr_t(start) || range->kind != kind || !range->allocated)
        return noted(cudaErrorInvalidValue);
    drain_device(range->device);
    remove_range(start);
    munmap(start, range->bytes);
    if (range->file >= 0) close(range->file);  // processes that have opened it keep it
    if (kind == Kind::device) return_bytes(range->device, range->bytes);
    return cudaSuccess;
}
}  // namespace

void add_range(const Range& range) {
    std::lock_guard<std::mutex> held(lock);
    ranges[range.start] = range;
}

std::optional<Range> range_of(const void* address) {
    std::lock_guard<std::mutex> held(lock);
    auto next = ranges.upper_bound(uintptr_t(address));
    if (next == ranges.begin()) return std::nullopt;
    const Range& range = std::prev(next)->second;
    if (uintptr_t(address) >= range.start + range.bytes) return std::nullopt;
    return range;
}

std::optional<Range> remove_range(const void* start) {
    std::lock_guard<std::mutex> held(lock);
    auto found = ranges.extract(uintptr_t(start));
    if (found.empty()) return std::nullopt;
    return found.mapped();
}

Kind kind_of(const void* address) {
    auto range = range_of(address);
    return range ? range->kind : Kind::pageable;
}

bool take_bytes(int device, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (taken[device] + bytes > device_bytes()) return false;
    taken[device] += bytes;
    return true;
}

void return_bytes(int device, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    taken[device] -= bytes;
}

size_t free_bytes(int device) {
    std::lock_guard<std::mutex> held(lock);
    return device_bytes() - taken[device];
}

void* map_file(int file, size_t bytes) {
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    struct stat facts;
    if (start == MAP_FAILED || fstat(file, &facts)) return nullptr;
    record::mapped(start, bytes, facts.st_ino, 0);
    return start;
}

void protect(void* start, size_t bytes, bool writable) {
    const int rights = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (device_memory_is_protected())
        pkey_mprotect(start, bytes, rights, protection_key());
    else
        mprotect(start, bytes, rights);
}

void allow_device_memory(bool allowed) {
    if (device_memory_is_protected()) pkey_set(protection_key(), allowed ? 0 : PKEY_DISABLE_ACCESS);
}

bool device_memory_is_protected() { return protection_key() >= 0; }

}  // namespace emulated

using namespace emulated;

CUDA_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    enter_runtime();
    *total = device_bytes();
    *free = free_bytes(host_thread().device);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaMalloc(void** start, size_t asked) {
    enter_runtime();
    if (cudaError_t error = unsafe_call()) return error;
    const int device = host_thread().device;
    const size_t bytes = whole_pages(asked);
    if (!take_bytes(device, bytes)) return noted(cudaErrorMemoryAllocation);
    const int file = memfd_create("emulated.malloc", MFD_CLOEXEC);
    *start = file < 0 || ftruncate(file, off_t(bytes)) ? nullptr : map_file(file, bytes);
    if (!*start) {
        if (file >= 0) close(file);
        return_bytes(device, bytes);
        return noted(cudaErrorMemoryAllocation);
    }
    if (bytes <= LARGEST_FILLED) std::memset(*start, PATTERN, bytes);
    protect(*start, bytes);
    add_range({uintptr_t(*start), bytes, Kind::device, device, true, false, file});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaFree(void* start) { return free_allocated(start, Kind::device); }

CUDA_API cudaError_t cudaMallocAsync(void** start, size_t bytes, cudaStream_t) { return cudaMalloc(start, bytes); }

CUDA_API cudaError_t cudaFreeAsync(void* start, cudaStream_t) { return cudaFree(start); }

CUDA_API cudaError_t cudaHostAlloc(void** start, size_t asked, unsigned) {
    enter_runtime();
    const size_t bytes = whole_pages(asked);
    *start = map_memory(bytes);
    if (!*start) return noted(cudaErrorMemoryAllocation);
    record::mapped(*start, bytes, 0, 0);
    add_range({uintptr_t(*start), bytes, Kind::pinned, host_thread().device, true});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaFreeHost(void* start) { return free_allocated(start, Kind::pinned); }

CUDA_API cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
    enter_runtime();
    add_range({uintptr_t(start), bytes, Kind::pinned, host_thread().device, false});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaHostUnregister(void* start) {
    enter_runtime();
    return remove_range(start) ? cudaSuccess : noted(cudaErrorHostMemoryNotRegistered);
}

CUDA_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    auto range = range_of(reinterpret_cast<void*>(address));
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = range->device; break;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *static_cast<bool*>(value) = range->gpudirect; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    enter_runtime();
    *attributes = {};
    auto range = range_of(address);
    if (!range) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = const_cast<void*>(address);
        return cudaSuccess;
    }
    attributes->type = range->kind == Kind::pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = range->device;
    attributes->devicePointer = const_cast<void*>(address);
    if (range->kind == Kind::pinned) attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}
