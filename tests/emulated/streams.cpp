// Streams, and how late they are: with EMULATED_DELAY_US, work that nobody waits for is seen to be missing.
//
// Each stream is a thread, so streams really run beside each other and beside the host, in orders that the machine's
// load decides; EMULATED_SEED only fixes what is drawn. Streams are never destroyed: threads may outlive their makers.
#include "streams.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "memory.h"
#include "python_lock.h"
#include "record.h"

namespace emulated {

namespace {
constexpr unsigned SPELL = 64;         // pieces of work of a stream, for which it lags alike
constexpr int LAGS[] = {0, 1, 1, 4};  // drawn for each spell: how late at most, in units of EMULATED_DELAY_US
constexpr unsigned LATE_PERCENT = 30;  // of the work in a spell is late at all

// Of the two below. Never held while a stream is waited for: its work may ask for streams.
std::mutex registry_lock;
std::unordered_set<Stream*> streams;
std::map<int, Stream*> default_streams;  // by device

Stream* registered(int device, int priority) {  // by holders of registry_lock
    auto* stream = new Stream(device, unsigned(streams.size()), priority);
    streams.insert(stream);
    return stream;
}
}  // namespace

void Mark::set() {
    {
        std::lock_guard<std::mutex> held(lock_);
        set_ = true;
        at_ = std::chrono::steady_clock::now();
    }
    reached_.notify_all();
}

void Mark::wait() {
    const WithoutPythonsLock meanwhile;  // which the thread that sets the mark may need
    std::unique_lock<std::mutex> held(lock_);
    reached_.wait(held, [this] { return set_; });
}

bool Mark::is_set() {
    std::lock_guard<std::mutex> held(lock_);
    return set_;
}

std::chrono::steady_clock::time_point Mark::set_at() {
    std::lock_guard<std::mutex> held(lock_);
    return at_;
}

Stream::Stream(int device, unsigned number, int priority) : device_(device), priority_(priority), number_(number) {
    std::seed_seq seed{unsigned(number_from_environment("EMULATED_SEED", 0)), unsigned(getpid()), number};
    random_.seed(seed);
}

void Stream::push(std::function<void()> work, int lags) {
    std::lock_guard<std::mutex> held(lock_);
    const uint64_t recorded = record::pushed(number_);
    push(Task{std::move(work), nullptr, lags, recorded});
}

void Stream::push(Task task) {
    ++unfinished_;
    queue_.push_back(std::move(task));
    if (!started_) std::thread([this] { work_off(); }).detach();
    started_ = true;
    pushed_.notify_one();
}

namespace {
thread_local Stream* current = nullptr;  // of a stream's thread
}

void Stream::hang() {
    current->hangs_ = true;
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

void Stream::work_off() {
    current = this;
    allow_device_memory(true);
    for (;;) {
        Task task;
        {
            std::unique_lock<std::mutex> held(lock_);
            pushed_.wait(held, [this] { return !queue_.empty(); });
            task = std::move(queue_.front());
            queue_.pop_front();
        }
        lag(task.lags);
        if (task.work) {
            const record::Running running(task.recorded);
            task.work();
        }
        --unfinished_;  // before the mark: whoever has waited for that finds the stream idle
        if (task.mark) task.mark->set();
    }
}

void Stream::lag(int lags) {
    static const int delay_us = number_from_environment("EMULATED_DELAY_US", 0);
    if (begun_++ % SPELL == 0) longest_lag_us_ = delay_us * LAGS[random_() % 4];
    if (longest_lag_us_ > 0 && random_() % 100 < LATE_PERCENT) usleep(random_() % (longest_lag_us_ * lags));
}

std::shared_ptr<Mark> Stream::mark() {
    std::lock_guard<std::mutex> held(lock_);
    auto mark = std::make_shared<Mark>(record::marked(number_));
    push(Task{nullptr, mark, 1, 0});
    return mark;
}

void Stream::follow(std::shared_ptr<Mark> mark) {
    std::lock_guard<std::mutex> held(lock_);
    record::waits(number_, mark->number());
    push(Task{[mark] { mark->wait(); }, nullptr, 1, 0});
}

void Stream::drain() {
    if (is_drained()) return;
    auto end = mark();
    end->wait();
    record::joined(end->number());
}

bool Stream::is_drained() {
    std::lock_guard<std::mutex> held(lock_);
    if (!idle()) return false;
    record::joined(record::marked(number_));
    return true;
}

Stream* make_stream(int device, int priority) {
    std::lock_guard<std::mutex> held(registry_lock);
    return registered(device, priority);
}

Stream* stream_of(cudaStream_t handle, int device) {
    std::lock_guard<std::mutex> held(registry_lock);
    if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
        Stream*& stream = default_streams[device];
        if (!stream) stream = registered(device, 0);
        return stream;
    }
    auto* stream = reinterpret_cast<Stream*>(handle);
    if (!streams.count(stream)) {
        std::fprintf(stderr, "emulated: %p is no stream\n", static_cast<void*>(handle));
        std::abort();
    }
    return stream;
}

Stream* stream_of(cudaStream_t handle) { return stream_of(handle, host_thread().device); }

namespace {
template <typename Which>
void drain_those(Which which) {
    std::vector<Stream*> all;
    {
        std::lock_guard<std::mutex> held(registry_lock);
        for (Stream* stream : streams)
            if (which(stream)) all.push_back(stream);
    }
    for (Stream* stream : all) stream->drain();
}
}  // namespace

void drain_device(int device) {
    drain_those([device](Stream* stream) { return stream->device() == device; });
}

void drain_all() {
    drain_those([](Stream* stream) { return !stream->hangs(); });
}

}  // namespace emulated
