// The operators' way to the streams, as C functions: one library is built with torch's headers and one without, and
// Python calls some of these too.
#include "bridge.h"

#include "device.h"
#include "memory.h"
#include "record.h"
#include "streams.h"

using namespace emulated;

CUDA_API void emulated_enqueue(cudaStream_t stream, int device, void (*run)(void*), void* data) {
    enter_runtime();
    stream_of(stream, device)->push([=] { run(data); });
}

CUDA_API void emulated_launch(cudaStream_t stream, int device, void (*run)(void*), void* data) {
    enter_runtime();
    stream_of(stream, device)->push([=] { run(data); }, LAGS_OF_TRANSFERS);
}

CUDA_API void emulated_drain(cudaStream_t stream, int device) {
    enter_runtime();
    stream_of(stream, device)->drain();
}

CUDA_API void emulated_drain_all() { drain_all(); }

CUDA_API void emulated_hang() { Stream::hang(); }

CUDA_API void emulated_allow(int allowed) { allow_device_memory(allowed != 0); }

CUDA_API void emulated_named(const char* name) { record::named(name); }

CUDA_API void emulated_touches(const void* start, size_t bytes, int written) {
    record::touches(start, bytes, written ? record::Mode::write : record::Mode::read);
}

CUDA_API void emulated_block(const void* start, size_t bytes, int given_out) {
    record::block(uint64_t(start), bytes, given_out != 0);
}

CUDA_API int emulated_protects() { return device_memory_is_protected(); }
