// A stand-in for NVSHMEM's host library over the emulated driver: what nvshmem4py calls for odc, and nothing else.
//
// Its bindings take a symbol that is loaded already before they look into libnvshmem_host, so the real Python package
// runs over this. The processes of a job (PEs) meet at a socket of rank 0, whose name is in the unique id and is gone
// once all have come; in each collective they send each other descriptors of their memory and of themselves. Hosts of
// the tests share the file system and nothing else.
//
// It is strict where the library's documentation is: host calls one at a time, on threads with a context; buffers of
// its own heap only. It is stricter in this: a pointer to a PE of another host (of another network namespace), for which
// the library gives none, is not asked for. And where the library is late, it is as late as it may be: a get that is not
// followed by a quiet on its stream never happens, and one from a PE that has died never ends. Whoever breaks a rule is
// ended with a message.
#include <net/if.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <device_host/nvshmem_types.h>

#include "bridge.h"
#include "device.h"

namespace {
constexpr int PATIENCE_S = 120;
constexpr size_t ALIGNMENT = 512, MIB = 1 << 20;
constexpr unsigned WITH_UNIQUEID = 1 << 3;  // NVSHMEMX_INIT_WITH_UNIQUEID

struct Chunk {  // physical memory of a heap, whose chunks follow each other
    int file;
    size_t bytes;
};

struct PE {
    ino_t host = 0;
    int process = -1;                // a descriptor that is readable once it has ended
    std::vector<Chunk> chunks;
    CUdeviceptr here = 0;            // where its heap is mapped for everyone, if it is on this host
    std::vector<char*> for_network;  // where each chunk is mapped for `transfer` alone
};

struct Get {
    char* into;
    size_t offset, bytes;
    int pe;
};

int me = -1, device = 0;
std::vector<PE> pes;
std::vector<int> connections;  // on rank 0 to each other PE, on these to rank 0
int listener = -1;             // of rank 0, until all have come
CUdeviceptr heap = 0;
size_t heap_bytes = 0, granularity = 0, mapped = 0, used = 0;
std::mutex lock;  // of what follows, and of `for_network`
std::map<cudaStream_t, std::vector<Get>> started;

[[noreturn]] void die(const std::string& why) {
    fprintf(stderr, "emulated NVSHMEM, PE %d: %s\n", me, why.c_str());
    fflush(stderr);
    _exit(70);
}

std::atomic<bool> busy{false};

struct HostCall {  // NVSHMEM_THREAD_SERIALIZED
    explicit HostCall(const char* name, bool initialized = true) {
        if (busy.exchange(true)) die(std::string(name) + " while another thread is in a host call");
        if (initialized && me < 0) die(std::string(name) + " before the library was started, or after its end");
        CUcontext context = nullptr;
        if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
            die(std::string(name) + " on a thread that has no context");
    }
    ~HostCall() { busy = false; }
};

size_t bytes_from_environment(const char* name, size_t otherwise) {
    const char* text = getenv(name);
    if (!text) return otherwise;
    char* unit = nullptr;
    const double number = strtod(text, &unit);
    const std::string units = "KMGT";
    const size_t power = *unit ? units.find(char(toupper(*unit))) : std::string::npos;
    return size_t(number * double(1ull << (power == std::string::npos ? 0 : 10 * (power + 1))));
}

size_t rounded(size_t bytes) { return (bytes + granularity - 1) / granularity * granularity; }

ino_t this_host() {
    struct stat facts;
    if (stat("/proc/self/ns/net", &facts)) die("cannot tell its host");
    return facts.st_ino;
}

void check_interface(bool needed) {
    const char* name = getenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME");
    if (!name && needed) die("over hosts NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME must name the interface to start through");
    if (name && !if_nametoindex(name)) die(std::string("there is no interface ") + name);
}

// What each PE tells the others in a collective: a number, and a descriptor or none.
struct Told {
    size_t number;
    int file;
};

void send_to(int connection, const Told& told) {
    size_t number = told.number;
    iovec bytes = {&number, sizeof number};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    if (told.file >= 0) {
        message.msg_control = space, message.msg_controllen = sizeof space;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &told.file, sizeof(int));
    }
    if (sendmsg(connection, &message, MSG_NOSIGNAL) < 0) die("a PE has gone in the midst of a collective");
}

Told receive_from(int connection, const char* what) {  // the library would wait for ever
    Told told = {0, -1};
    iovec bytes = {&told.number, sizeof told.number};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    message.msg_control = space, message.msg_controllen = sizeof space;
    const ssize_t count = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    if (count <= 0) die(std::string(what) + " is a collective, and a PE " + (count ? "has not come" : "has gone"));
    if (cmsghdr* header = CMSG_FIRSTHDR(&message)) memcpy(&told.file, CMSG_DATA(header), sizeof(int));
    return told;
}

std::vector<Told> exchange(const char* what, const Told& mine) {  // by PE
    const timeval patience = {PATIENCE_S, 0};
    for (int one : connections) setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    std::vector<Told> all(pes.size());
    all[me] = mine;
    if (me == 0) {
        for (size_t pe = 1; pe < pes.size(); ++pe) all[pe] = receive_from(connections[pe - 1], what);
        for (int one : connections)
            for (const Told& told : all) send_to(one, told);
    } else {
        send_to(connections[0], mine);
        for (size_t pe = 0; pe < pes.size(); ++pe) {
            const Told told = receive_from(connections[0], what);
            if (int(pe) != me) all[pe] = told;
            else if (told.file >= 0) close(told.file);  // its own, come back
        }
    }
    return all;
}

sockaddr_un address_of(const nvshmemx_uniqueid_t& id) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, id.internal, sizeof address.sun_path - 1);
    return address;
}

void connect_all(const nvshmemx_uniqueid_t& id) {
    const sockaddr_un address = address_of(id);
    if (me != 0) {
        const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address)) die("rank 0 is not there");
        send_to(made, {size_t(me), -1});
        connections = {made};
        return;
    }
    connections.resize(pes.size() - 1);
    for (size_t come = 0; come < connections.size(); ++come) {
        const int accepted = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        connections.at(receive_from(accepted, "nvshmemx_hostlib_init_attr").number - 1) = accepted;
    }
    unlink(address.sun_path);
    close(listener);
}

void check(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) die(std::string(what) + " failed with " + std::to_string(result));
}

void map_at(CUdeviceptr where, CUmemGenericAllocationHandle handle, size_t bytes) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(cuMemMap(where, bytes, 0, handle, 0), "cuMemMap");
    check(cuMemSetAccess(where, bytes, &access, 1), "cuMemSetAccess");
    check(cuMemRelease(handle), "cuMemRelease");
}

int grow(size_t bytes) {  // the new memory's descriptor, or -1 if there is not so much
    CUmemAllocationProp asked = {};
    asked.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    asked.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    asked.location.id = device;
    asked.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle;
    if (mapped + bytes > heap_bytes || cuMemCreate(&handle, bytes, &asked, 0) != CUDA_SUCCESS) return -1;
    int file = -1;
    check(cuMemExportToShareableHandle(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExport");
    map_at(heap + mapped, handle, bytes);
    mapped += bytes;
    return file;
}

bool in_heap(const void* start, size_t bytes) {
    const auto first = CUdeviceptr(start);
    return first >= heap && first + bytes <= heap + used;
}

bool ended(const PE& pe) {
    pollfd one = {pe.process, POLLIN, 0};
    return poll(&one, 1, 0) > 0;
}

const char* memory_of(PE& pe, size_t number) {
    std::lock_guard<std::mutex> held(lock);
    pe.for_network.resize(pe.chunks.size());
    char*& found = pe.for_network[number];
    if (!found) {
        void* start = mmap(nullptr, pe.chunks[number].bytes, PROT_READ, MAP_SHARED, pe.chunks[number].file, 0);
        if (start == MAP_FAILED) die("cannot map the memory of a PE");
        found = static_cast<char*>(start);
    }
    return found;
}

void transfer(const Get& get) {  // on a stream's thread
    PE& pe = pes[get.pe];
    size_t done = 0, begin = 0;
    for (size_t i = 0; done < get.bytes; begin += pe.chunks[i++].bytes) {
        const size_t end = begin + pe.chunks[i].bytes, at = get.offset + done;
        if (at >= end) continue;
        if (ended(pe)) emulated_hang();  // a PE that is gone answers nothing
        const size_t part = std::min(get.bytes - done, end - at);
        memcpy(get.into + done, memory_of(pe, i) + (at - begin), part);
        done += part;
    }
}
}  // namespace

#define NVSHMEM_API extern "C" __attribute__((visibility("default")))

NVSHMEM_API int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
    HostCall here("nvshmemx_get_uniqueid", false);
    check_interface(false);
    *id = {};
    snprintf(id->internal, sizeof id->internal, "/tmp/emulated-nvshmem.%lx.%x", long(this_host()), unsigned(getpid()));
    const sockaddr_un address = address_of(*id);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    unlink(address.sun_path);
    if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) || listen(listener, 128)) return 1;
    id->version = (1 << 16) + sizeof *id;
    return 0;
}

NVSHMEM_API int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, const nvshmemx_uniqueid_t* id,
                                                nvshmemx_init_attr_t* attributes) {
    attributes->args.uid_args = {int((1 << 16) + sizeof(nvshmemx_uniqueid_args_t)),
                                 const_cast<nvshmemx_uniqueid_t*>(id), rank, ranks};
    return 0;
}

NVSHMEM_API int nvshmemx_hostlib_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes) {
    HostCall here("nvshmemx_hostlib_init_attr", false);
    const nvshmemx_uniqueid_args_t& asked = attributes->args.uid_args;
    if (me >= 0 || flags != WITH_UNIQUEID) return 1;
    if (getenv("NVSHMEM_DISABLE_CUDA_VMM")) die("emulated is the heap of CUDA's virtual memory alone");
    if (cudaGetDevice(&device) != cudaSuccess) die("no device is current");
    me = asked.myrank;
    pes = std::vector<PE>(size_t(asked.nranks));
    granularity = bytes_from_environment("NVSHMEM_CUMEM_GRANULARITY", 512 * MIB);
    heap_bytes = rounded(bytes_from_environment("NVSHMEM_MAX_MEMORY_PER_GPU", size_t(128) << 30));
    check(cuMemAddressReserve(&heap, heap_bytes, granularity, 0, 0), "cuMemAddressReserve");
    connect_all(*asked.id);
    const Told self = {this_host(), int(syscall(SYS_pidfd_open, getpid(), 0))};
    const std::vector<Told> all = exchange("nvshmemx_hostlib_init_attr", self);
    for (size_t pe = 0; pe < pes.size(); ++pe) {
        pes[pe].host = all[pe].number, pes[pe].process = all[pe].file;
        check_interface(pes[pe].host != self.number);
    }
    return 0;
}

NVSHMEM_API int nvshmemx_init_status() { return me < 0 ? 0 : 2; }

NVSHMEM_API int nvshmem_my_pe() { return me; }

NVSHMEM_API int nvshmem_n_pes() { return int(pes.size()); }

NVSHMEM_API void nvshmem_info_get_version(int* major, int* minor) { *major = 1, *minor = 3; }

NVSHMEM_API void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    *major = 3, *minor = 4, *patch = 5;
}

NVSHMEM_API void* nvshmem_malloc(size_t bytes) {
    HostCall here("nvshmem_malloc");
    const size_t start = (used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t lacking = start + bytes > mapped ? rounded(start + bytes - mapped) : 0;
    const std::vector<Told> all = exchange("nvshmem_malloc", {lacking, lacking ? grow(lacking) : -1});
    bool fits = true;
    for (size_t pe = 0; pe < pes.size(); ++pe) {
        if (all[pe].number != lacking) die("nvshmem_malloc of another size than PE " + std::to_string(pe));
        if (all[pe].file >= 0) pes[pe].chunks.push_back({all[pe].file, lacking});
        else fits = fits && !lacking;
    }
    if (!fits) return nullptr;
    used = start + bytes;
    return reinterpret_cast<void*>(heap + start);
}

NVSHMEM_API void nvshmem_free(void* start) {
    HostCall here("nvshmem_free");
    if (!in_heap(start, 1)) die("nvshmem_free of memory that is not its own");
    exchange("nvshmem_free", {0, -1});
}

NVSHMEM_API void* nvshmem_ptr(const void* start, int pe) {
    HostCall here("nvshmem_ptr");
    if (!in_heap(start, 1)) die("nvshmem_ptr of memory that is not in its heap");
    if (pe == me) return const_cast<void*>(start);
    PE& peer = pes.at(size_t(pe));
    if (peer.host != pes[me].host) die("nvshmem_ptr of PE " + std::to_string(pe) + ", which is on another host");
    if (!peer.here) {
        check(cuMemAddressReserve(&peer.here, mapped, granularity, 0, 0), "cuMemAddressReserve");
        size_t at = 0;
        for (const Chunk& chunk : peer.chunks) {
            CUmemGenericAllocationHandle handle;
            check(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t(chunk.file)),
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "cuMemImport");
            map_at(peer.here + at, handle, chunk.bytes);
            at += chunk.bytes;
        }
    }
    return reinterpret_cast<void*>(peer.here + (CUdeviceptr(start) - heap));
}

NVSHMEM_API void nvshmemx_getmem_nbi_on_stream(void* into, const void* from, size_t bytes, int pe,
                                               cudaStream_t stream) {
    HostCall here("nvshmemx_getmem_nbi_on_stream");
    if (pe < 0 || pe >= int(pes.size())) die("there is no PE " + std::to_string(pe));
    if (!in_heap(into, bytes)) die("a get into memory that is not in its heap, nor registered");
    if (!in_heap(from, bytes)) die("a get from what is no symmetric address");
    struct Start {
        cudaStream_t stream;
        Get get;
    };
    emulated_named("a get of NVSHMEM's");  // that comes with the quiet, which odc asks for at once
    emulated_touches(into, bytes, 1);
    auto* start = new Start{stream, {static_cast<char*>(into), CUdeviceptr(from) - heap, bytes, pe}};
    emulated_enqueue(stream, device, [](void* data) {
        auto* one = static_cast<Start*>(data);
        std::lock_guard<std::mutex> held(lock);
        started[one->stream].push_back(one->get);
        delete one;
    }, start);
}

NVSHMEM_API void nvshmemx_quiet_on_stream(cudaStream_t stream) {
    HostCall here("nvshmemx_quiet_on_stream");
    emulated_enqueue(stream, device, [](void* data) {
        std::vector<Get> gets;
        {
            std::lock_guard<std::mutex> held(lock);
            gets.swap(started[static_cast<cudaStream_t>(data)]);
        }
        for (const Get& get : gets) transfer(get);
    }, stream);
}

NVSHMEM_API int nvshmemx_cumodule_init(CUmodule) {
    HostCall here("nvshmemx_cumodule_init");
    return 0;
}

NVSHMEM_API void nvshmemx_hostlib_finalize() {
    HostCall here("nvshmemx_hostlib_finalize");
    exchange("nvshmemx_hostlib_finalize", {0, -1});
    for (PE& pe : pes) {
        const CUdeviceptr base = &pe == &pes[me] ? heap : pe.here;
        size_t at = 0;
        for (size_t i = 0; i < pe.chunks.size(); at += pe.chunks[i++].bytes) {
            if (base) check(cuMemUnmap(base + at, pe.chunks[i].bytes), "cuMemUnmap");
            if (i < pe.for_network.size() && pe.for_network[i]) munmap(pe.for_network[i], pe.chunks[i].bytes);
            close(pe.chunks[i].file);
        }
        close(pe.process);
    }
    for (int one : connections) close(one);
    me = -1, mapped = used = 0;
    pes.clear(), connections.clear();
}
