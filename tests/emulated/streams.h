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
    explicit Mark(uint64_t number = 0) : number_(number) {}
    void set();
    void wait();
    bool is_set();
    uint64_t number() const { return number_; }  // in the record of the run
    std::chrono::steady_clock::time_point set_at();  // only of one that is set

private:
    const uint64_t number_;
    std::mutex lock_;
    std::condition_variable reached_;
    bool set_ = false;
    std::chrono::steady_clock::time_point at_;
};

// Of what odc asks for: ranks that do the same at the same time part only by as much as one of them is late, and a few
// of these make the difference between two versions of the weights.
constexpr int LAGS_OF_TRANSFERS = 16;

class Stream {
public:
    Stream(int device, unsigned number, int priority);
    void push(std::function<void()> work, int lags = 1);  // returns at once; the work may be late by as many lags
    std::shared_ptr<Mark> mark();           // set when all that was pushed so far is done
    void drain();                           // returns when all that was pushed so far is done
    void follow(std::shared_ptr<Mark> mark);  // what is pushed from now on waits for a mark
    bool is_drained();                      // whether all is done that was pushed so far; if so, it is joined
    bool idle() const { return unfinished_ == 0; }
    unsigned number() const { return number_; }
    bool hangs() const { return hangs_; }
    static void hang();  // of a stream's thread: returns never, and the process may end nevertheless
    int device() const { return device_; }
    int priority() const { return priority_; }

private:
    struct Task {
        std::function<void()> work;  // none: only a mark
        std::shared_ptr<Mark> mark;  // to be set when the stream is past it
        int lags = 1;
        uint64_t recorded = 0;
    };
    void push(Task task);  // by holders of the lock
    void work_off();
    void lag(int lags);

    const int device_, priority_;
    const unsigned number_;
    std::mt19937 random_;  // this and the next two: the stream's thread's
    int longest_lag_us_ = 0;
    unsigned begun_ = 0;  // pieces of work
    std::mutex lock_;
    std::condition_variable pushed_;
    std::deque<Task> queue_;
    bool started_ = false;
    std::atomic<int> unfinished_{0};
    std::atomic<bool> hangs_{false};
};

Stream* make_stream(int device, int priority);

// The stream behind a handle of CUDA's; 0 and the handles of "legacy" and "per thread" are the device's default one.
Stream* stream_of(cudaStream_t handle, int device);
Stream* stream_of(cudaStream_t handle);  // of the calling thread's device

void drain_device(int device);
void drain_all();  // but for those that hang

}  // namespace emulated
