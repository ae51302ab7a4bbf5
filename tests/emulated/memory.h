// What is known of memory: which addresses are the device's, which are pinned, how much of a device is taken.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

namespace emulated {

enum class Kind { pageable, pinned, device };

struct Range {
    uintptr_t start = 0;
    size_t bytes = 0;
    Kind kind = Kind::pageable;
    int device = 0;
    bool allocated = false;  // by this library, rather than registered or mapped
    bool gpudirect = false;  // whether whoever made it asked that network cards may reach it
    int file = -1;           // of memory that other processes may open (ipc.cpp)
};

void add_range(const Range& range);
std::optional<Range> range_of(const void* address);     // that holds the address
std::optional<Range> remove_range(const void* start);   // that starts there
Kind kind_of(const void* address);

bool take_bytes(int device, size_t bytes);  // false, and nothing taken, if the device has not as many left
void return_bytes(int device, size_t bytes);
size_t free_bytes(int device);

void* map_file(int file, size_t bytes);  // all of a memory file, for the host so far; null on failure

// Device memory from now on: threads of streams may read and, if it is writable, write it; those of the host die of
// SIGSEGV if they do, and so does a stream that writes what is not writable.
void protect(void* start, size_t bytes, bool writable = true);
// For the calling thread.
void allow_device_memory(bool allowed);
// False where the processor has no protection keys: host code may touch device memory there, unseen.
bool device_memory_is_protected();

}  // namespace emulated
