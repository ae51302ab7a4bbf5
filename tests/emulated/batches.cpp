// Batches of copies by both ABIs: of CUDA 12.8, which drivers keep under the plain name, and of CUDA 13 ("_v2").
//
// What the documentation leaves undefined is refused: copies that depend on each other, copies of nothing. A batch comes
// in any order and in two parts, each of which may be late, but as a whole in its stream's turn.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "copies.h"
#include "device.h"
#include "memory.h"
#include "record.h"
#include "streams.h"

#undef cuMemcpyBatchAsync  // the header renames it to the newer one

using namespace emulated;

namespace {
constexpr size_t NONE = SIZE_MAX;  // the error is of no certain copy

struct Copy {
    CUdeviceptr to, from;
    size_t bytes;
    CUmemcpySrcAccessOrder order;
};

struct Refusal {
    size_t copy;
    std::string why;
};

bool overlap(CUdeviceptr one, size_t bytes, CUdeviceptr other, size_t other_bytes) {
    return one < other + other_bytes && other < one + bytes;
}

bool is_default(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY; }

void check_attributes(size_t count, const CUmemcpyAttributes* attributes, const size_t* first, size_t kinds) {
    if (kinds == 0 || kinds > count) throw Refusal{NONE, "as many attributes as copies at most, and one at least"};
    if (first[0] != 0) throw Refusal{NONE, "the first attributes are not those of the first copy"};
    for (size_t k = 0; k < kinds; ++k) {
        if (k > 0 && first[k] <= first[k - 1]) throw Refusal{NONE, "indices of attributes do not increase"};
        if (first[k] >= count) throw Refusal{NONE, "attributes of copies beyond the last"};
        const auto order = attributes[k].srcAccessOrder;
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            throw Refusal{first[k], "no order of accesses to the source"};
        if (attributes[k].flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) throw Refusal{first[k], "unknown flags"};
    }
}

void check_alone(const std::vector<Copy>& copies) {
    for (size_t i = 0; i < copies.size(); ++i) {
        const Copy& one = copies[i];
        if (one.bytes == 0) throw Refusal{i, "a copy of nothing"};
        if (!stays_inside(reinterpret_cast<void*>(one.to), one.bytes) ||
            !stays_inside(reinterpret_cast<void*>(one.from), one.bytes))
            throw Refusal{i, "a copy over the end of an allocation"};
    }
}

void check_together(const std::vector<Copy>& copies) {
    for (size_t i = 0; i < copies.size(); ++i)
        for (size_t j = 0; j < copies.size(); ++j) {
            const Copy &one = copies[i], &other = copies[j];
            if (overlap(one.to, one.bytes, other.from, other.bytes)) throw Refusal{i, "a target that is a source, too"};
            if (i != j && overlap(one.to, one.bytes, other.to, other.bytes)) throw Refusal{i, "targets overlap"};
        }
}

std::mt19937& random_numbers() {  // of the calling thread
    thread_local std::mt19937 engine = [] {
        std::seed_seq seed{unsigned(number_from_environment("EMULATED_SEED", 0)), unsigned(gettid())};
        return std::mt19937(seed);
    }();
    return engine;
}

// Sources that may be read out of the stream's turn are read now.
std::function<void()> work_of(const Copy& copy) {
    auto *to = reinterpret_cast<void*>(copy.to), *from = reinterpret_cast<void*>(copy.from);
    const size_t bytes = copy.bytes;
    if (copy.order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return [=] { std::memcpy(to, from, bytes); };
    allow_device_memory(true);
    auto read = std::make_shared<std::vector<char>>(static_cast<char*>(from), static_cast<char*>(from) + bytes);
    allow_device_memory(false);
    return [=] { std::memcpy(to, read->data(), bytes); };
}

void push(const std::vector<Copy>& copies, Stream* stream) {
    std::vector<std::function<void()>> all;
    for (const Copy& copy : copies) all.push_back(work_of(copy));
    std::shuffle(all.begin(), all.end(), random_numbers());
    const auto middle = all.begin() + long(random_numbers()() % all.size());
    record::named("a batch of copies");
    for (const Copy& copy : copies) {
        record::touches(reinterpret_cast<void*>(copy.to), copy.bytes, record::Mode::write);
        record::touches(reinterpret_cast<void*>(copy.from), copy.bytes, record::Mode::read);
    }
    for (const auto& part : {std::vector(all.begin(), middle), std::vector(middle, all.end())})
        stream->push(
            [part] {
                for (const auto& work : part) work();
            },
            LAGS_OF_TRANSFERS);
}

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUmemcpyAttributes* attributes,
                    size_t* first, size_t kinds, size_t* failed, CUstream stream) {
    if (failed) *failed = NONE;
    if (!host_thread().has_context) return CUDA_ERROR_INVALID_CONTEXT;
    try {
        if (is_default(stream)) throw Refusal{NONE, "the default stream takes no batches"};
        check_attributes(count, attributes, first, kinds);
        std::vector<Copy> copies;
        for (size_t i = 0, k = 0; i < count; ++i) {
            while (k + 1 < kinds && first[k + 1] <= i) ++k;
            copies.push_back({to[i], from[i], bytes[i], attributes[k].srcAccessOrder});
        }
        check_alone(copies);
        check_together(copies);
        push(copies, stream_of(stream));
        return CUDA_SUCCESS;
    } catch (const Refusal& refusal) {
        std::fprintf(stderr, "emulated: a batch of %zu copies is refused: %s\n", count, refusal.why.c_str());
        if (failed) *failed = refusal.copy;
        return CUDA_ERROR_INVALID_VALUE;
    }
}
}  // namespace

CUDA_API CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                                     CUmemcpyAttributes* attributes, size_t* first, size_t kinds, size_t* failed,
                                     CUstream stream) {
    return copy_batch(to, from, bytes, count, attributes, first, kinds, failed, stream);
}

CUDA_API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                                        CUmemcpyAttributes* attributes, size_t* first, size_t kinds, CUstream stream) {
    return copy_batch(to, from, bytes, count, attributes, first, kinds, nullptr, stream);
}
