// Devices, contexts and errors: the emulated device is a Hopper in what torch asks before it picks a code path.
//
// Attributes that are not listed are 0, which torch reads as "cannot". Nothing here has a speed.
#include "device.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace emulated {

namespace {
constexpr int CUDA_VERSION_TOLD = 13000;
constexpr const char* NAME = "emulated device (host memory)";
const CUcontext THE_CONTEXT = reinterpret_cast<CUcontext>(0x1000);  // compared by callers, never followed
constexpr int MOST = 64;  // devices
std::atomic<bool> entered[MOST];  // devices on which this process has a context

bool is_device(int device) { return device >= 0 && device < device_count(); }
}  // namespace

int number_from_environment(const char* name, int otherwise) {
    const char* value = std::getenv(name);
    return value && *value ? std::atoi(value) : otherwise;
}

// Of the machine's devices those that CUDA_VISIBLE_DEVICES names, by number and up to the first that is not there; all
// where it is not set.
static const std::vector<int>& devices() {
    static const std::vector<int> seen = [] {
        const int count = std::min(number_from_environment("EMULATED_DEVICES", 1), MOST);
        std::vector<int> found;
        const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
        for (int device = 0; !text && device < count; ++device) found.push_back(device);
        for (int device; text && std::sscanf(text, "%d", &device) == 1 && device >= 0 && device < count;) {
            found.push_back(device);
            text = std::strchr(text, ',');
            if (text) ++text;
        }
        return found;
    }();
    return seen;
}

int device_count() { return int(devices().size()); }

int on_machine(int device) { return devices()[device]; }

int in_process(int device) {
    const auto found = std::find(devices().begin(), devices().end(), device);
    return found == devices().end() ? -1 : int(found - devices().begin());
}

size_t device_bytes() {
    static const size_t bytes = size_t(number_from_environment("EMULATED_GIB", 80)) << 30;
    return bytes;
}

HostThread& host_thread() {
    thread_local HostThread state;
    return state;
}

void enter_runtime() {
    host_thread().has_context = true;
    entered[host_thread().device] = true;
}

cudaError_t noted(cudaError_t error) {
    if (error != cudaSuccess) host_thread().last_error = error;
    return error;
}

}  // namespace emulated

using namespace emulated;

// ---- the runtime

CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDA_VERSION_TOLD;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaGetDevice(int* device) {
    *device = host_thread().device;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return noted(cudaErrorInvalidDevice);
    host_thread().device = device;
    enter_runtime();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
    std::snprintf(id, size, "0000:%02x:00.0", on_machine(device) + 1);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!is_device(device)) return noted(cudaErrorInvalidDevice);
    cudaDeviceProp p{};
    std::snprintf(p.name, sizeof p.name, "%s", NAME);
    p.uuid.bytes[0] = char(on_machine(device) + 1);
    p.pciBusID = on_machine(device) + 1;
    p.totalGlobalMem = device_bytes();
    p.major = 9;
    p.multiProcessorCount = 132;
    p.warpSize = 32;
    p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 2147483647;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.maxThreadsPerMultiProcessor = 2048;
    p.maxBlocksPerMultiProcessor = 32;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 49152;
    p.sharedMemPerBlockOptin = 232448;
    p.sharedMemPerMultiprocessor = 233472;
    p.l2CacheSize = 60 << 20;
    p.unifiedAddressing = p.canMapHostMemory = p.concurrentKernels = p.streamPrioritiesSupported = 1;
    *properties = p;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    if (auto error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) return error;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(properties.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(properties.sharedMemPerBlockOptin); break;
        case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

CUDA_API const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorNotSupported: return "not supported by the emulated device";
        default: return "an error of the emulated device";
    }
}

CUDA_API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

CUDA_API cudaError_t cudaGetLastError() { return std::exchange(host_thread().last_error, cudaSuccess); }

CUDA_API cudaError_t cudaPeekAtLastError() { return host_thread().last_error; }

// ---- the driver

CUDA_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUDA_API CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION_TOLD;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuDeviceGetCount(int* count) {
    *count = device_count();
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
            *value = number_from_environment("EMULATED_GPUDIRECT", 1);
            break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
            *value = number_from_environment("EMULATED_RDMA_ORDERING", CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES);
            break;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
            *value = number_from_environment("EMULATED_RDMA_FLUSH", CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
            break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// Nothing writes to device memory from outside: a flush has nothing to do, but may not be what the device lacks.
CUDA_API CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
    if (!host_thread().has_context) return CUDA_ERROR_INVALID_CONTEXT;
    const int options = number_from_environment("EMULATED_RDMA_FLUSH", CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
    return options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUDA_API CUresult cuGetErrorName(CUresult error, const char** text) {
    switch (error) {
        case CUDA_SUCCESS: *text = "no error"; break;
        case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
        case CUDA_ERROR_INVALID_CONTEXT: *text = "invalid device context"; break;
        case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
        default: *text = "an error of the emulated driver";
    }
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

CUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = host_thread().has_context ? THE_CONTEXT : nullptr;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
    host_thread().has_context = context != nullptr;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = entered[device];
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = THE_CONTEXT;
    return CUDA_SUCCESS;
}
