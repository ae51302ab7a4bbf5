// Python's lock (the GIL), which the thread of a stream takes to interpret a kernel or to let go of a tensor.
#pragma once

namespace emulated {

// The calling thread is without it for as long as this lives, if it holds it: a thread that waited for a stream and kept
// it would wait for ever. A real driver needs no such thing, because nothing on a device runs in Python.
class WithoutPythonsLock {
public:
    WithoutPythonsLock();
    ~WithoutPythonsLock();

private:
    void* state_ = nullptr;  // of the thread, if it held the lock
};

}  // namespace emulated
