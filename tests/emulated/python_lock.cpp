// Python's functions are looked up, as this library is loaded into programs without Python, too.
#include "python_lock.h"

#include <dlfcn.h>

namespace emulated {

namespace {
template <typename Function>
Function found(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

bool held() {
    static const auto initialized = found<int (*)()>("Py_IsInitialized"), check = found<int (*)()>("PyGILState_Check");
    return initialized && check && initialized() && check();
}
}  // namespace

WithoutPythonsLock::WithoutPythonsLock() {
    static const auto save = found<void* (*)()>("PyEval_SaveThread");
    if (held()) state_ = save();
}

WithoutPythonsLock::~WithoutPythonsLock() {
    static const auto restore = found<void (*)(void*)>("PyEval_RestoreThread");
    if (state_) restore(state_);
}

}  // namespace emulated
