// Copies and fills, in a stream's turn, between memory of the device and of the host.
//
// Pageable memory of the host is read and written before the call returns, pinned memory whenever the stream comes to
// it, as under CUDA. A copy over the end of an allocation is an error, which a real device may not notice.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "copies.h"
#include "device.h"
#include "memory.h"
#include "record.h"
#include "streams.h"

namespace emulated {

bool stays_inside(const void* start, size_t bytes) {
    auto range = range_of(start);
    if (!range || uintptr_t(start) + bytes <= range->start + range->bytes) return true;
    std::fprintf(stderr, "emulated: a copy of %zu bytes at %p runs over the end of its allocation\n", bytes, start);
    return false;
}

}  // namespace emulated

using namespace emulated;

namespace {
cudaError_t copy(void* to, const void* from, size_t bytes, Stream* stream, int lags = 1) {
    if (bytes == 0) return cudaSuccess;
    if (!stays_inside(to, bytes) || !stays_inside(from, bytes)) return cudaErrorInvalidValue;
    record::named("a copy");
    record::touches(to, bytes, record::Mode::write);
    record::touches(from, bytes, record::Mode::read);
    if (kind_of(from) == Kind::pageable) {
        auto first = static_cast<const char*>(from);
        auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
        stream->push([=] { std::memcpy(to, staged->data(), bytes); }, lags);
    } else {
        stream->push([=] { std::memmove(to, from, bytes); }, lags);
    }
    if (kind_of(to) == Kind::pageable) stream->drain();
    return cudaSuccess;
}
}  // namespace

CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    enter_runtime();
    return noted(copy(to, from, bytes, stream_of(stream)));
}

CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    auto error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    stream_of(nullptr)->drain();
    return error;
}

CUDA_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (!host_thread().has_context) return CUDA_ERROR_INVALID_CONTEXT;
    const auto source = reinterpret_cast<void*>(from);
    auto error = copy(reinterpret_cast<void*>(to), source, bytes, stream_of(stream), LAGS_OF_TRANSFERS);
    return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    enter_runtime();
    if (!stays_inside(to, bytes)) return noted(cudaErrorInvalidValue);
    record::named("a fill");
    record::touches(to, bytes, record::Mode::write);
    stream_of(stream)->push([=] { std::memset(to, value, bytes); });
    return cudaSuccess;
}

CUDA_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    auto error = cudaMemsetAsync(to, value, bytes, nullptr);
    stream_of(nullptr)->drain();
    return error;
}

CUDA_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
    if (!host_thread().has_context) return CUDA_ERROR_INVALID_CONTEXT;
    auto* first = reinterpret_cast<unsigned*>(to);
    if (!stays_inside(first, words * sizeof *first)) return CUDA_ERROR_INVALID_VALUE;
    record::named("a fill");
    record::touches(first, words * sizeof *first, record::Mode::write);
    stream_of(stream)->push([=] { std::fill_n(first, words, value); });
    return CUDA_SUCCESS;
}
