// Links between devices: each reaches every other's memory; which add to it atomically, pair by pair, is told.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace emulated;

namespace {
bool is_device(int device) { return device >= 0 && device < device_count(); }

// EMULATED_P2P_ATOMICS: 1 for all pairs of devices, 0 for none, or those that have them: "0-1,2-3".
bool has_native_atomics(int one, int other) {
    const char* text = std::getenv("EMULATED_P2P_ATOMICS");
    if (!text || !std::strchr(text, '-')) return number_from_environment("EMULATED_P2P_ATOMICS", 1) != 0;
    const auto pair = std::minmax(one, other);
    for (int low, high; text && std::sscanf(text, "%d-%d", &low, &high) == 2;) {
        if (low == pair.first && high == pair.second) return true;
        text = std::strchr(text, ',');
        if (text) ++text;
    }
    return false;
}
}  // namespace

CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

CUDA_API CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
    if (!is_device(from) || !is_device(to) || from == to) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
        case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: *value = 1; break;
        case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
            *value = has_native_atomics(on_machine(from), on_machine(to));
            break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}
