// What the driver says of an address: where its allocation begins and ends. torch looks up the name without a version.
#include "device.h"
#include "memory.h"

#undef cuMemGetAddressRange

using namespace emulated;

CUDA_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
    const auto range = range_of(reinterpret_cast<void*>(address));
    if (!range || range->kind != Kind::device) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = range->start;
    if (bytes) *bytes = range->bytes;
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
    return cuMemGetAddressRange_v2(start, bytes, address);
}
