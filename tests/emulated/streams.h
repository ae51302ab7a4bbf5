// Streams: queues of work, each with a thread that does it in order; marks tell others how far one has come.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace emulated {

// Set once, by a stream that has come this far.
class Mark {
public:
    void set();
    void wait();
    bool is_set();
    std::chrono::steady_clock::time_point set_at();  // only of one that is set

private:
    std::mutex lock_;
    std::condition_variable reached_;
    bool set_ = false;
    std::chrono::steady_clock::time_point at_;
};

class Stream {
public:
    Stream(int device, unsigned number, int priority);
    void push(std::function<void()> work);  // returns at once
    std::shared_ptr<Mark> mark();           // set when all that was pushed so far is done
    void drain();                           // returns when all that was pushed so far is done
    bool idle() const { return unfinished_ == 0; }
    int device() const { return device_; }
    int priority() const { return priority_; }

private:
    struct Task {
        std::function<void()> work;  // none: only a mark
        std::shared_ptr<Mark> mark;  // to be set when the stream is past it
    };
    void push(Task task);
    void work_off();
    void lag();

    const int device_, priority_;
    std::mt19937 random_;  // this and the next two: the stream's thread's
    int longest_lag_us_ = 0;
    unsigned begun_ = 0;  // pieces of work
    std::mutex lock_;
    std::condition_variable pushed_;
    std::deque<Task> queue_;
    bool started_ = false;
    std::atomic<int> unfinished_{0};
};

Stream* make_stream(int device, int priority);

// The stream behind a handle of CUDA's; 0 and the handles of "legacy" and "per thread" are the device's default one.
Stream* stream_of(cudaStream_t handle, int device);
Stream* stream_of(cudaStream_t handle);  // of the calling thread's device

void drain_device(int device);

}  // namespace emulated
