// What a run did, for a judge who reads it afterwards: which bytes each piece of work touched, and what ordered what.
//
// With EMULATED_RECORD=<folder> each process appends records of one size to a file of its own there, which
// tests/support/ordered reads. Nothing is judged here, and no process waits for another.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulated::record {

enum class Kind : uint32_t {
    task = 1,  // stream, task, name, 1 if its accesses come while it runs
    access,    // task (0: the thread itself, now), address, bytes, Mode
    done,      // task whose accesses have all come
    mark,      // stream, mark
    wait,      // stream, mark that it waits for
    join,      // mark that the thread has seen reached
    map,       // address, bytes, inode (0: memory of this process alone), offset in the file
    release,   // key, value, Key, name
    acquire,   // key, value, Key, name
    add,       // key, value after it, value before it, name
    region,    // address, bytes, name
    thread,    // name of the calling thread
    stream,    // stream, name
    process,   // name of this process
    plain,     // key, value of a store that orders nothing
    site,      // name of where the thread is in odc
    block,     // address, bytes of a block of torch's allocator, 1 if it is given out and 0 if it is given back
};
enum class Mode : uint64_t { read, write, atomic };
enum class Key : uint64_t { word, lock, object, message };

bool on();  // whether this thread's calls are recorded now

// Of the work that the calling thread is about to push: `pushed` takes them.
void named(const char* name);
void touches(const void* start, size_t bytes, Mode mode);
void touches_as_it_runs();
// By a stream, under its lock, so that records have the order of the queue. The task's number; 0: it touches nothing.
uint64_t pushed(unsigned stream);
uint64_t marked(unsigned stream);  // the mark's number; 0 where nothing is recorded
void waits(unsigned stream, uint64_t mark);

void joined(uint64_t mark);
void block(uint64_t start, size_t bytes, bool given_out);
void mapped(const void* start, size_t bytes, uint64_t inode, size_t offset);

// While one lives, the calling thread does this task.
struct Running {
    explicit Running(uint64_t task);
    ~Running();
};

// While one lives, nothing that this thread does is recorded: what only the emulation needs.
struct Quiet {
    Quiet();
    ~Quiet();
};

}  // namespace emulated::record
