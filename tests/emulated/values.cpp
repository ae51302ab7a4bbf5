// Values between CUDA, CPU and meta tensors. A CPU tensor is a view of device memory, so that its kernel reads and
// writes the bytes that a CUDA kernel would, when it would. A view holds no memory: work that is still queued when its
// memory is given out again shows as wrong numbers, which is what these tests look for.
#include "values.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

#include "bridge.h"

namespace emulated {

namespace {
void keep_promotion(const at::Tensor& from, at::Tensor& to) {  // a Python number weighs less than a tensor
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor meta_of(const at::Tensor& tensor) {
    auto options = tensor.options().device(at::kMeta).requires_grad(false);
    auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    keep_promotion(tensor, meta);
    return meta;
}

at::Tensor turned(const at::Tensor& tensor, To to, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) return to == To::host ? host_view(tensor) : meta_of(tensor);
    if (to == To::meta) return tensor.dim() == 0 ? tensor : meta_of(tensor);  // one number mixes with any device
    return written ? tensor : tensor.detach().clone();
}

// Row by row where a tensor has gaps, as long as the rows are few: what lies between may be another stream's.
void touches(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || tensor.is_meta() || tensor.numel() == 0 || !tensor.has_storage()) return;
    constexpr size_t MOST_ROWS = 4096;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the smallest stride first
    for (int64_t i = 0; i < tensor.dim(); ++i)
        if (tensor.size(i) > 1 && tensor.stride(i) != 0) dims.emplace_back(tensor.stride(i), tensor.size(i));
    std::sort(dims.begin(), dims.end());
    int64_t run = 1;  // elements without a gap
    size_t first = 0;
    for (; first < dims.size() && dims[first].first <= run; ++first) run = dims[first].first * (dims[first].second - 1) + run;
    size_t rows = 1;
    for (size_t i = first; i < dims.size(); ++i) rows *= size_t(dims[i].second);
    const auto width = int64_t(tensor.element_size());
    const auto* start = static_cast<const char*>(tensor.data_ptr());
    if (rows > MOST_ROWS) {
        for (; first < dims.size(); ++first) run += dims[first].first * (dims[first].second - 1);
        rows = 1;
    }
    for (size_t row = 0; row < rows; ++row) {
        int64_t at = 0;
        size_t rest = row;
        for (size_t i = first; i < dims.size() && rows > 1; ++i) {
            at += int64_t(rest % size_t(dims[i].second)) * dims[i].first;
            rest /= size_t(dims[i].second);
        }
        emulated_touches(start + at * width, size_t(run * width), written);
    }
}

bool is_list_of_optional(const IValue& value) {
    if (!value.isList() || value.toListRef().empty()) return false;
    auto type = value.type()->cast<c10::ListType>();
    return type && type->getElementType()->kind() == c10::TypeKind::OptionalType;
}
}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    if (tensor.is_conj()) view._set_conj(true);
    if (tensor.is_neg()) view._set_neg(true);
    keep_promotion(tensor, view);
    return view;
}

IValue turned(const IValue& value, To to, bool written) {
    if (value.isTensor()) return turned(value.toTensor(), to, written);
    if (value.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(turned(tensor, to, written));
        return out;
    }
    if (is_list_of_optional(value)) {
        c10::List<std::optional<at::Tensor>> out;
        for (std::optional<at::Tensor> one : c10::impl::toTypedList<std::optional<at::Tensor>>(value.toList()))
            out.push_back(one ? std::optional<at::Tensor>(turned(*one, to, written)) : one);
        return out;
    }
    if (value.isDevice()) return c10::Device(to == To::host ? at::kCPU : at::kMeta);
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) return IValue();
    return value;
}

void touches(const IValue& value, bool written) {
    if (value.isTensor()) return touches(value.toTensor(), written);
    if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) touches(tensor, written);
    if (is_list_of_optional(value))
        for (std::optional<at::Tensor> one : c10::impl::toTypedList<std::optional<at::Tensor>>(value.toList()))
            if (one) touches(*one, written);
}

IValue allocated_like(const IValue& shapes, c10::Device device) {
    auto like = [&](const at::Tensor& shape) {
        if (!shape.defined()) return shape;
        return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
    };
    if (shapes.isTensor()) return like(shapes.toTensor());
    c10::List<at::Tensor> out;
    for (const at::Tensor& shape : shapes.toTensorVector()) out.push_back(like(shape));
    return out;
}

void store(const IValue& made, const IValue& given) {
    if (given.isTensor()) {
        if (given.toTensor().defined()) given.toTensor().copy_(made.toTensor());
        return;
    }
    auto from = made.toTensorVector(), to = given.toTensorVector();
    for (size_t i = 0; i < to.size(); ++i)
        if (to[i].defined()) to[i].copy_(from[i]);
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool has_random_numbers(const c10::FunctionSchema& schema) {
    static const std::set<std::string> without_generator = {"aten::native_dropout", "aten::_fused_dropout"};
    const auto& arguments = schema.arguments();
    return without_generator.count(schema.name()) > 0 ||
           std::any_of(arguments.begin(), arguments.end(), [](const auto& one) { return one.name() == "generator"; });
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
    const auto& returns = schema.returns();
    return std::all_of(returns.begin(), returns.end(), [](const auto& one) {
        auto type = one.type()->str();
        return type == "Tensor" || type == "Tensor[]";
    });
}

bool returns_only_written(const c10::FunctionSchema& schema) {
    return std::all_of(schema.returns().begin(), schema.returns().end(), is_written);
}

bool is_out_variant(const c10::FunctionSchema& schema) {
    const auto& arguments = schema.arguments();
    return std::any_of(arguments.begin(), arguments.end(),
                       [](const auto& one) { return is_written(one) && one.kwarg_only(); });
}

const IValue& written_argument(const c10::FunctionSchema& schema, size_t result, c10::ArrayRef<IValue> arguments) {
    const auto& wanted = schema.returns()[result].alias_info()->beforeSets();
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto& argument = schema.arguments()[i];
        if (is_written(argument) && argument.alias_info()->beforeSets() == wanted) return arguments[i];
    }
    throw std::runtime_error("emulated: no argument of " + schema.name() + " is what it returns");
}

}  // namespace emulated
