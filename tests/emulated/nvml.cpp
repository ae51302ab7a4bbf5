// NVML, as far as torch asks: for links between devices, of which there are none, and for the driver's version.
//
// The calls are declared here, since the CUDA wheels do not carry NVML's header; nothing checks the signatures.
#include "device.h"

namespace {
constexpr int NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3;
}

CUDA_API int nvmlInit_v2() { return NVML_SUCCESS; }

CUDA_API int nvmlShutdown() { return NVML_SUCCESS; }

CUDA_API int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = unsigned(emulated::number_from_environment("EMULATED_DEVICES", 1));  // also those that CUDA is not shown
    return NVML_SUCCESS;
}

CUDA_API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
    *device = reinterpret_cast<void*>(1);  // not followed by anybody
    return NVML_SUCCESS;
}

CUDA_API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NVML_ERROR_NOT_SUPPORTED; }

CUDA_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_ERROR_NOT_SUPPORTED; }

// A state of 0, as the caller has set it, says that there is no fabric.
CUDA_API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NVML_SUCCESS; }

CUDA_API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return NVML_SUCCESS;
}

CUDA_API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 13000;
    return NVML_SUCCESS;
}
