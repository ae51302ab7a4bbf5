// CUDA's calls about streams and events, over streams.h: an event is the mark of its last recording.
//
// Every stream is non-blocking, as torch's are: programs that count on the legacy default stream waiting for others run
// out of order here.
#include "device.h"
#include "record.h"
#include "streams.h"

#undef cuStreamWriteValue32  // the header renames it; torch looks the plain name up

using namespace emulated;

namespace {
struct Event {
    std::shared_ptr<Mark> mark;  // none before it is recorded; then it counts as reached
};

std::shared_ptr<Mark>& mark_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event)->mark; }
}  // namespace

CUDA_API cudaError_t cudaDeviceSynchronize() {
    enter_runtime();
    drain_device(host_thread().device);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    enter_runtime();
    *stream = reinterpret_cast<cudaStream_t>(make_stream(host_thread().device, priority));
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = stream_of(stream)->priority();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    enter_runtime();
    stream_of(stream)->drain();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

CUDA_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    enter_runtime();
    return stream_of(stream)->is_drained() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    enter_runtime();
    if (auto mark = mark_of(event)) stream_of(stream)->follow(mark);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    enter_runtime();
    stream_of(stream)->push([=] { function(data); });
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    enter_runtime();
    stream_of(stream)->push([=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}

CUDA_API CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
    if (!host_thread().has_context) return CUDA_ERROR_INVALID_CONTEXT;
    auto* word = reinterpret_cast<cuuint32_t*>(address);
    stream_of(stream)->push([=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
    return CUDA_SUCCESS;
}

CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t* dependencies) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (dependencies) *dependencies = 0;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    enter_runtime();
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Event*>(event);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    enter_runtime();
    mark_of(event) = stream_of(stream)->mark();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

CUDA_API cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (cudaError_t error = unsafe_call()) return error;
    auto mark = mark_of(event);
    if (mark && !mark->is_set()) return cudaErrorNotReady;
    if (mark) record::joined(mark->number());
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    enter_runtime();
    if (auto mark = mark_of(event)) {
        mark->wait();
        record::joined(mark->number());
    }
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto first = mark_of(start), last = mark_of(end);
    if (!first || !last) return noted(cudaErrorInvalidResourceHandle);
    if (!first->is_set() || !last->is_set()) return noted(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(last->set_at() - first->set_at()).count();
    return cudaSuccess;
}
