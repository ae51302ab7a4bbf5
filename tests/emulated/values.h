// Arguments and results of operators, turned into what CPU kernels and meta kernels take; what a schema says of a call.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace emulated {

using c10::IValue;
using Stack = torch::jit::Stack;

// The same bytes as a CPU tensor that holds nothing: torch's allocator decides when they are free, as on a device.
at::Tensor host_view(const at::Tensor& tensor);

enum class To { host, meta };

// A value with its CUDA tensors turned into views by the host or into meta tensors. Tensors in host memory that are not
// written are copied for `host`: a kernel gets the value of the moment when it was launched.
IValue turned(const IValue& value, To to, bool written);

// New tensors on the device, of the shapes and strides of these.
IValue allocated_like(const IValue& shapes, c10::Device device);

// Copies results into the tensors, or lists of tensors, that callers were given.
void store(const IValue& made, const IValue& given);

// Notes that the work which is enqueued next reads, or writes, what these tensors span of memory.
void touches(const IValue& value, bool written);

bool is_written(const c10::Argument& argument);
bool has_random_numbers(const c10::FunctionSchema& schema);
bool returns_only_tensors(const c10::FunctionSchema& schema);
bool returns_only_written(const c10::FunctionSchema& schema);
bool is_out_variant(const c10::FunctionSchema& schema);

// The caller's own argument, which the operator writes and returns.
const IValue& written_argument(const c10::FunctionSchema& schema, size_t result, c10::ArrayRef<IValue> arguments);

}  // namespace emulated
