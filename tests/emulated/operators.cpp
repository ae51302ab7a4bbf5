// Operators on CUDA tensors: each is its CPU kernel over the same memory, run in the turn of the current stream.
//
// One boxed function replaces the CUDA kernels of all aten operators. A call returns when its results are allocated, in
// the shapes that the operator's meta kernel tells, and its work waits in the stream's queue. Operators with random
// numbers, with results that are no tensors, or without a meta kernel drain their stream and run at once, so they hide
// what a device would show. Numbers are the CPU's. An operator that fails late ends the process, like a device fault.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <set>

#include "bridge.h"
#include "values.h"

namespace emulated {

namespace {
struct Call {
    c10::OperatorHandle op;
    Stack arguments;
    c10::Device device;
    c10::cuda::CUDAStream stream;

    const c10::FunctionSchema& schema() const { return op.schema(); }
    size_t results() const { return schema().returns().size(); }
    bool writes(size_t argument) const { return is_written(schema().arguments()[argument]); }
    bool result_is_written(size_t result) const { return is_written(schema().returns()[result]); }
    Stack arguments_turned(To to) const {
        Stack out;
        for (size_t i = 0; i < arguments.size(); ++i) out.push_back(turned(arguments[i], to, writes(i)));
        return out;
    }
};

// The calling thread may touch device memory for as long as this lives.
struct Allowed {
    Allowed() { emulated_allow(1); }
    ~Allowed() { emulated_allow(0); }
};

// For as long as this lives, what the calling thread does is left out of the record of the run: a wait that a device
// would not need.
struct Unrecorded {
    Unrecorded() { emulated_quiet(1); }
    ~Unrecorded() { emulated_quiet(-1); }
};

c10::Device device_of(c10::ArrayRef<IValue> arguments) {
    for (const IValue& value : arguments) {
        if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda())
            return value.toTensor().device();
        if (value.isTensorList())
            for (const at::Tensor& tensor : value.toTensorVector())
                if (tensor.defined() && tensor.is_cuda()) return tensor.device();
        if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) return value.toDevice();
    }
    return c10::Device(at::kCUDA, c10::cuda::current_device());
}

bool writes_host_memory(const Call& call) {
    for (size_t i = 0; i < call.arguments.size(); ++i) {
        const IValue& value = call.arguments[i];
        if (call.writes(i) && value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cuda())
            return true;
    }
    return false;
}

// What the call returns, allocated but not computed; nothing if only running it can tell.
std::optional<Stack> results_in_advance(const Call& call) {
    const auto& schema = call.schema();
    if (has_random_numbers(schema) || !returns_only_tensors(schema) || writes_host_memory(call)) return std::nullopt;
    Stack results, shapes;
    const bool in_place = returns_only_written(schema) && !is_out_variant(schema);
    if (!in_place) {
        shapes = call.arguments_turned(To::meta);
        try {
            call.op.callBoxed(shapes);
        } catch (const std::exception&) {
            return std::nullopt;  // no meta kernel; or a wrong call, whose error the CPU kernel will tell
        }
    }
    for (size_t i = 0; i < call.results(); ++i) {
        if (!call.result_is_written(i)) {
            results.push_back(allocated_like(shapes[i], call.device));
            continue;
        }
        const IValue& given = written_argument(schema, i, call.arguments);
        if (!in_place && given.isTensor() && given.toTensor().sizes() != shapes[i].toTensor().sizes())
            given.toTensor().resize_(shapes[i].toTensor().sizes());
        results.push_back(given);
    }
    return results;
}

// What the work that is enqueued next reads and writes, for the record of the run.
void note(const Call& call, const Stack& results) {
    emulated_named(call.schema().name().c_str());
    for (size_t i = 0; i < call.arguments.size(); ++i) touches(call.arguments[i], call.writes(i));
    for (size_t i = 0; i < results.size(); ++i)
        if (!call.result_is_written(i)) touches(results[i], true);
}

struct Work {
    c10::OperatorHandle op;
    Stack arguments;
    std::vector<IValue> results;  // views by the host of what the caller was given; none for what is written in place
};

void run(void* data) {
    std::unique_ptr<Work> work(static_cast<Work*>(data));
    at::AutoDispatchBelowADInplaceOrView no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_cast(c10::autocast_dispatch_keyset);
    try {
        work->op.callBoxed(work->arguments);
        for (size_t i = 0; i < work->results.size(); ++i)
            if (!work->results[i].isNone()) store(work->arguments[i], work->results[i]);
    } catch (const std::exception& error) {
        std::cerr << "emulated: " << work->op.schema().name() << " failed in its stream: " << error.what() << std::endl;
        std::abort();
    }
}

void run_later(const Call& call, const Stack& results) {
    auto* work = new Work{call.op, call.arguments_turned(To::host), {}};
    for (size_t i = 0; i < results.size(); ++i)
        work->results.push_back(call.result_is_written(i) ? IValue() : turned(results[i], To::host, true));
    note(call, results);
    emulated_enqueue(call.stream.stream(), call.device.index(), run, work);
}

// By the calling thread, for which the stream is drained before.
Stack run_at_once(const Call& call) {
    {
        Unrecorded wait;
        emulated_drain(call.stream.stream(), call.device.index());
    }
    Stack values = call.arguments_turned(To::host);
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;  // what the caller gave; what the kernel may resize instead
    if (is_out_variant(call.schema()))
        for (size_t i = 0; i < values.size(); ++i)
            if (call.writes(i) && call.arguments[i].isTensor() && call.arguments[i].toTensor().is_cuda()) {
                Allowed allowed;
                outs.emplace_back(call.arguments[i].toTensor(), values[i].toTensor().clone());
                values[i] = outs.back().second;
            }
    {
        Allowed allowed;
        at::AutoDispatchBelowADInplaceOrView no_grad;
        call.op.callBoxed(values);
    }
    for (auto& [given, made] : outs) {
        if (given.sizes() != made.sizes()) given.resize_(made.sizes());
        Allowed allowed;
        host_view(given).copy_(made);
    }
    Stack results;
    for (size_t i = 0; i < call.results(); ++i) {
        if (call.result_is_written(i)) {
            results.push_back(written_argument(call.schema(), i, call.arguments));
        } else if (values[i].isTensor() || values[i].isTensorList()) {
            results.push_back(allocated_like(values[i], call.device));
            Allowed allowed;
            store(values[i], turned(results.back(), To::host, true));
        } else {
            results.push_back(values[i]);
        }
    }
    note(call, results);
    emulated_enqueue(call.stream.stream(), call.device.index(), [](void*) {}, nullptr);
    return results;
}

// Who gives a block back orders what it knew before what the thread does that is given the block next. Attached late, as
// torch makes its allocator when CUDA is first used.
void watch_allocator() {
    using namespace c10::cuda::CUDACachingAllocator;
    static const bool once = [] {
        if (!emulated_records()) return false;
        attachAllocatorTraceTracker([](const TraceEntry& entry) {
            const auto action = entry.action_;
            if (action == TraceEntry::ALLOC || action == TraceEntry::FREE_REQUESTED)
                emulated_block(reinterpret_cast<void*>(entry.addr_), entry.size_, action == TraceEntry::ALLOC);
        });
        return true;
    }();
    (void)once;
}

void any_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    const auto device = device_of(arguments);
    watch_allocator();
    c10::cuda::CUDAGuard guard(device);
    const Call call{op, std::move(arguments), device, c10::cuda::getCurrentCUDAStream(device.index())};
    auto results = results_in_advance(call);
    if (results)
        run_later(call, *results);
    else
        results = run_at_once(call);
    for (IValue& result : *results) stack->push_back(std::move(result));
}

struct Copy {
    at::Tensor to, from;
};

void run_copy(void* data) {
    std::unique_ptr<Copy> copy(static_cast<Copy*>(data));
    at::AutoDispatchBelowADInplaceOrView no_grad;
    copy->to.copy_(copy->from);
}

// Between devices and the host: waits for the stream where torch does, which is not for pinned memory if told so.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (to.numel() == 0) return to;
    const auto source = from.expand(to.sizes());
    const auto device = to.is_cuda() ? to.device() : from.device();
    c10::cuda::CUDAGuard guard(device);
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    bool wait = false;
    if (from.is_cuda() && to.is_cuda() && from.device() != to.device()) {
        const auto other = from.device().index();
        emulated_drain(c10::cuda::getCurrentCUDAStream(other).stream(), other);
        wait = true;
    } else if (!to.is_cuda()) {
        wait = !(non_blocking && to.is_pinned());
    } else if (!from.is_cuda()) {
        wait = !non_blocking;
    }
    const bool stays = from.is_cuda() || (non_blocking && from.is_pinned());
    auto* copy = new Copy{to.is_cuda() ? host_view(to) : to,
                          from.is_cuda() ? host_view(source) : stays ? source : source.detach().clone()};
    emulated_named("aten::copy_");
    touches(to, true);
    touches(from, false);
    emulated_enqueue(stream.stream(), device.index(), run_copy, copy);
    if (wait) emulated_drain(stream.stream(), device.index());
    return to;
}

int64_t attention_by_matrix_products(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                     const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
    return 0;  // torch's number for it; the others have no CPU kernels of their names
}

// Those whose CUDA code launches nothing: allocations, views, and what ends in copy_ or a copy of the runtime.
const std::set<std::string> KEPT = {
    "aten::empty", "aten::empty_strided", "aten::set_", "aten::is_set_to", "aten::resize_", "aten::_resize_output_",
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::alias", "aten::view_as_real",
    "aten::view_as_complex", "aten::_nested_view_from_buffer", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::is_pinned", "aten::_pin_memory", "aten::_efficientzerotensor", "aten::_copy_from",
    "aten::_copy_from_and_resize", "aten::_cudnn_init_dropout_state", "aten::copy_", "aten::_fused_sdp_choice",
};

bool is_replaced(const c10::OperatorHandle& op) {
    if (op.schema().name().rfind("aten::", 0) != 0 || KEPT.count(op.schema().name())) return false;
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return false;
    const auto& returns = op.schema().returns();
    return std::none_of(returns.begin(), returns.end(),
                        [](const auto& one) { return one.alias_info() && !one.alias_info()->isWrite(); });  // a view
}

struct Silence : c10::WarningHandler {  // of torch's warning that kernels are replaced
    void process(const c10::Warning&) override {}
};

bool replace_kernels() {
    Silence silence;
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(name);
        if (!op || !is_replaced(*op)) continue;
        library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operator>());
    }
    library.impl("aten::copy_", TORCH_FN(copy_));
    library.impl("aten::_fused_sdp_choice", TORCH_FN(attention_by_matrix_products));
    return true;
}

const bool replaced = replace_kernels();  // when the library is loaded
}  // namespace

}  // namespace emulated
