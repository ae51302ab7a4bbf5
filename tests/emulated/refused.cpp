// What torch may ask for and the emulated device cannot do: graphs and memory pools.
//
// A symbol that is missing here would be found in the real runtime, which torch brings along, and that would look for a
// real driver.
#include "device.h"

#define REFUSED(name, ...) \
    CUDA_API cudaError_t name(__VA_ARGS__) { return emulated::noted(cudaErrorNotSupported); }

REFUSED(cudaStreamBeginCapture, cudaStream_t, cudaStreamCaptureMode)
REFUSED(cudaStreamEndCapture, cudaStream_t, cudaGraph_t*)
REFUSED(cudaGraphInstantiateWithFlags, cudaGraphExec_t*, cudaGraph_t, unsigned long long)
REFUSED(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t)
REFUSED(cudaGraphDestroy, cudaGraph_t)
REFUSED(cudaGraphExecDestroy, cudaGraphExec_t)
REFUSED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
REFUSED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
REFUSED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
REFUSED(cudaGetSymbolAddress, void**, const void*)
REFUSED(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
