// Kernels: torch's are registered by name, and a launch of one is the end of the process.
//
// An operator whose CPU kernel does not stand in for it (operators.cpp) would otherwise leave its output unwritten. A
// test that reaches such a kernel dies with the kernel's name. `torch.cuda._sleep` alone is run: its stream sleeps.
#include <cxxabi.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "streams.h"

using namespace emulated;

namespace {
constexpr int CYCLES_A_US = 1000;  // of a device's clock

std::mutex lock;  // of the names

// Kernels by their host functions. Libraries register theirs while they are loaded, before this one's own variables
// are made, and it is never freed: others still run at exit.
std::unordered_map<const void*, std::string>& names() {
    static auto* names = new std::unordered_map<const void*, std::string>;
    return *names;
}

std::string name_of(const void* function) {
    std::lock_guard<std::mutex> held(lock);
    auto found = names().find(function);
    return found == names().end() ? "(unknown)" : found->second;
}

std::string readable(const std::string& mangled) {
    int status = 0;
    char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name = status == 0 ? text : mangled;
    std::free(text);
    return name;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
    enter_runtime();
    const std::string name = name_of(function);
    if (name.find("spin_kernel") == std::string::npos) {
        std::fprintf(stderr, "emulated: there is no device to run the kernel %s\n", readable(name).c_str());
        std::abort();
    }
    const auto cycles = *static_cast<int64_t*>(arguments[0]);
    stream_of(stream)->push([=] { usleep(useconds_t(cycles / CYCLES_A_US)); });
    return cudaSuccess;
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};

std::vector<Configuration>& configurations() {
    thread_local std::vector<Configuration> pushed;
    return pushed;
}
}  // namespace

// ---- called by code that nvcc has made

CUDA_API void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}

CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}

CUDA_API void __cudaUnregisterFatBinary(void**) {}

CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

CUDA_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
    std::lock_guard<std::mutex> held(lock);
    names()[function] = name;
}

CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
    configurations().push_back({grid, block, shared, stream});
    return 0;
}

CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const Configuration last = configurations().back();
    configurations().pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}

CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

// ---- launches

CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
    return launch(kernel, arguments, stream);
}

CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    return launch(function, arguments, stream);
}

CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    return launch(function, arguments, config->stream);
}

CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                            unsigned) {
    *blocks = 1;
    return cudaSuccess;
}
