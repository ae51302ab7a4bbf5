// What a capture of a CUDA graph in the default, "global" mode means for other threads. Nothing is captured here: a test
// says when one would go on. Calls that CUDA calls potentially unsafe then fail on every thread, and end the capture,
// but for threads whose mode is relaxed, and, with mode "thread local", for those that capture nothing themselves.
#include <atomic>

#include "device.h"

using namespace emulated;

namespace {
std::atomic<bool> capturing{false}, broken{false};
thread_local int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
}  // namespace

cudaError_t emulated::unsafe_call() {
    if (!capturing || mode != CU_STREAM_CAPTURE_MODE_GLOBAL) return cudaSuccess;
    broken = true;
    return noted(cudaErrorStreamCaptureUnsupported);
}

// Begins (1), or ends (0) what stands for a capture; returns whether the one before was broken.
CUDA_API int emulated_capture(int on) {
    const bool before = broken.exchange(false);
    capturing = on != 0;
    return before;
}

CUDA_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* wanted) {
    const int before = mode;
    mode = *wanted;
    *wanted = CUstreamCaptureMode(before);
    return CUDA_SUCCESS;
}

CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
    auto driver_mode = CUstreamCaptureMode(*wanted);
    cuThreadExchangeStreamCaptureMode(&driver_mode);
    *wanted = cudaStreamCaptureMode(driver_mode);
    return cudaSuccess;
}
