// The driver's functions by name: torch asks the runtime for them, cuda.bindings and cuda.core ask the driver.
//
// What this library exports is there, and nothing else. A function that was changed keeps its name in CUDA and gets a
// new symbol ("cuMemAlloc" is `cuMemAlloc_v2` since 3.2), so the newest is answered, unless the caller asks for the
// functions of a CUDA from before the change.
#include <dlfcn.h>

#include <string>

#include "device.h"

using namespace emulated;

namespace {
struct Change {
    const char* name;
    int version;  // of CUDA, since when the symbol with "_v2" is what the name stands for
};
// Of those that programs ask for by both their versions; for all others the newest symbol is right.
constexpr Change CHANGES[] = {{"cuMemcpyBatchAsync", 13000}};

void* exported(const std::string& symbol) {
    static void* const self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&exported), &info);
        return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }();
    // Only of this library: `dlsym` would go on in those that it links.
    void* found = dlsym(self, symbol.c_str());
    Dl_info here, there;
    const bool ours = found && dladdr(reinterpret_cast<void*>(&exported), &here) && dladdr(found, &there) &&
                      here.dli_fbase == there.dli_fbase;
    return ours ? found : nullptr;
}

void* driver_function(const std::string& name, int version) {
    for (const Change& change : CHANGES)
        if (name == change.name && version < change.version) return exported(name);
    for (const char* suffix : {"_v4", "_v3", "_v2", ""})
        if (void* found = exported(name + suffix)) return found;
    return nullptr;
}
}  // namespace

CUDA_API CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                                      CUdriverProcAddressQueryResult* found) {
    *function = driver_function(name, version);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                                      unsigned long long, cudaDriverEntryPointQueryResult* found) {
    enter_runtime();
    *function = driver_function(name, int(version));
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
