// A log is a file that the process has mapped: a record is a few stores, and those of a killed process are kept.
#include "record.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "memory.h"
#include "streams.h"

namespace emulated::record {

namespace {
constexpr size_t LOG_BYTES = size_t(1) << 34;  // of addresses; the file is as long as what was written, and sparse
struct Record {
    uint64_t time;  // CLOCK_MONOTONIC, one clock for all processes; written last, so 0 is "not whole yet"
    uint32_t kind, thread;
    uint64_t a, b, c, d;
};
struct Head {
    std::atomic<uint64_t> records;
    uint64_t pid, pad[4];
};
static_assert(sizeof(Record) == 48 && sizeof(Head) == 48, "the format of log.py");

struct Log {
    Head* head = nullptr;
    int names_file = -1;
    std::mutex lock;  // of the names
    std::unordered_map<std::string, uint64_t> names;
    std::atomic<uint64_t> numbers{1};  // of tasks and marks
};
Log* log_ = nullptr;  // of this process; a forked child starts its own
std::mutex opening;

struct Pending {
    const void* start;
    size_t bytes;
    Mode mode;
};
struct Thread {
    uint32_t number = 0;
    int quiet = 0;
    const char* name = nullptr;
    std::vector<Pending> touched;
    bool touches_later = false;  // than it is pushed
    uint64_t running = 0;        // task
    uint64_t last[4] = {};  // the thread's last record, if that was an acquire: a poll that finds the same is left out
};
Thread& self() {
    thread_local Thread thread;
    return thread;
}

const char* folder() {
    static const char* path = std::getenv("EMULATED_RECORD");
    return path && *path ? path : nullptr;
}

void forget() {  // in a forked child
    log_ = nullptr;
    self().number = 0;
    new (&opening) std::mutex;
}

Log* opened() {
    std::lock_guard<std::mutex> held(opening);
    if (log_) return log_;
    static const int once = pthread_atfork(nullptr, nullptr, forget);
    (void)once;
    struct stat space;  // of process numbers: the hosts of a test have one each, and the same numbers
    if (stat("/proc/self/ns/pid", &space)) space.st_ino = 0;
    const std::string base = std::string(folder()) + "/" + std::to_string(space.st_ino) + "." + std::to_string(getpid());
    const int file = open((base + ".log").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    auto* log = new Log;
    log->names_file = open((base + ".names").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    void* start = MAP_FAILED;
    if (file >= 0 && ftruncate(file, off_t(LOG_BYTES)) == 0)
        start = mmap(nullptr, LOG_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (start == MAP_FAILED || log->names_file < 0) {
        std::perror("emulated: the folder of EMULATED_RECORD");
        std::abort();
    }
    close(file);
    log->head = static_cast<Head*>(start);
    log->head->pid = uint64_t(getpid());
    return log_ = log;
}

Log& log() { return log_ ? *log_ : *opened(); }

// Backward runs in threads of torch's while the thread that called it waits: they count as the process's main thread.
uint32_t number_of_thread() {
    char name[32] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_autograd", 11) == 0 ? uint32_t(getpid()) : uint32_t(syscall(SYS_gettid));
}

uint64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

void put(Kind kind, uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
    Thread& thread = self();
    if (!thread.number) thread.number = number_of_thread();
    thread.last[0] = 0;
    Head* head = log().head;
    const uint64_t at = head->records.fetch_add(1);
    Record& record = reinterpret_cast<Record*>(head)[at + 1];
    record.kind = uint32_t(kind);
    record.thread = thread.number;
    record.a = a, record.b = b, record.c = c, record.d = d;
    __atomic_store_n(&record.time, now(), __ATOMIC_RELEASE);
}

uint64_t number_of(const char* name) {  // of a text, which goes into the file of names once
    Log& mine = log();
    std::lock_guard<std::mutex> held(mine.lock);
    auto [found, fresh] = mine.names.try_emplace(name, mine.names.size() + 1);
    if (fresh) {
        const std::string line = std::to_string(found->second) + "\t" + name + "\n";
        if (write(mine.names_file, line.data(), line.size()) < 0) std::perror("emulated: names");
    }
    return found->second;
}
}  // namespace

bool on() { return folder() && !self().quiet; }

void named(const char* name) { self().name = name; }

void touches(const void* start, size_t bytes, Mode mode) {
    if (on() && bytes && kind_of(start) != emulated::Kind::pageable) self().touched.push_back({start, bytes, mode});
}

void touches_as_it_runs() { self().touches_later = on(); }

uint64_t pushed(unsigned stream) {
    Thread& thread = self();
    uint64_t task = 0;
    if (on() && (thread.touches_later || !thread.touched.empty())) {
        task = log().numbers++;
        put(Kind::task, stream, task, number_of(thread.name ? thread.name : "?"), thread.touches_later);
        for (const Pending& one : thread.touched)
            put(Kind::access, task, uint64_t(one.start), one.bytes, uint64_t(one.mode));
        if (!thread.touches_later) task = 0;  // all is said
    }
    thread.touched.clear();
    thread.touches_later = false;
    thread.name = nullptr;
    return task;
}

uint64_t marked(unsigned stream) {
    if (!on()) return 0;
    const uint64_t mark = log().numbers++;
    put(Kind::mark, stream, mark);
    return mark;
}

void waits(unsigned stream, uint64_t mark) {
    if (on() && mark) put(Kind::wait, stream, mark);
}

void joined(uint64_t mark) {
    if (on() && mark) put(Kind::join, mark);
}

void block(uint64_t start, size_t bytes, bool given_out) {
    if (on()) put(Kind::block, start, bytes, given_out);
}

void mapped(const void* start, size_t bytes, uint64_t inode, size_t offset) {
    if (on()) put(Kind::map, uint64_t(start), bytes, inode, offset);
}

Running::Running(uint64_t task) { self().running = task; }

Running::~Running() {
    if (self().running) put(Kind::done, self().running);
    self().running = 0;
}

Quiet::Quiet() { ++self().quiet; }
Quiet::~Quiet() { --self().quiet; }

}  // namespace emulated::record

using namespace emulated;

// ---- for Python (python/recording.py)

CUDA_API int emulated_records() { return record::folder() != nullptr; }

CUDA_API void emulated_quiet(int more) { record::self().quiet += more; }

// The calling thread is Python's: a thread has the name of the one that made it until it gets its own.
CUDA_API void emulated_is_python_thread() { record::self().number = uint32_t(syscall(SYS_gettid)); }

CUDA_API uint64_t emulated_name(const char* name) { return record::on() ? record::number_of(name) : 0; }

// A thread that polls a word notes a value once. Of other keys each acquire counts: what was released meanwhile has no
// other value.
CUDA_API void emulated_note(unsigned kind, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    if (!record::on()) return;
    auto& last = record::self().last;
    const uint64_t one[4] = {a, b, c, 1};
    const bool polls = record::Kind(kind) == record::Kind::acquire && c == uint64_t(record::Key::word);
    if (polls && std::memcmp(last, one, sizeof one) == 0) return;
    record::put(record::Kind(kind), a, b, c, d);
    if (polls) std::memcpy(last, one, sizeof one);
}

// What the calling thread enqueues next says what it touches while it runs, by `emulated_accessed`.
CUDA_API void emulated_touches_as_it_runs(const char* name) {
    if (!record::on()) return;
    record::touches_as_it_runs();
    record::named(name);
}

CUDA_API void emulated_accessed(const uint64_t* starts, const uint64_t* bytes, size_t count, uint64_t mode) {
    const uint64_t task = record::self().running;
    for (size_t i = 0; task && i < count; ++i) record::put(record::Kind::access, task, starts[i], bytes[i], mode);
}

CUDA_API unsigned emulated_stream_number(cudaStream_t stream, int device) {
    return stream_of(stream, device)->number();
}
