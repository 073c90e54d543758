// SPDX-License-Identifier: Apache-2.0
//
// The one table of calls through which everything of ours reaches a GPU: the CUDA driver API's own
// functions with their own meanings and results (0 is success), under names and types of our own,
// so that no CUDA header is needed. It is filled from the driver's library at run time, or by the
// emulator (kernels/emu/driver.h), which runs the same host code on machines without a GPU, or from
// a library that stands in for the driver's and has the emulator inside (kernels/emu/soft.h).
//
// Calls work on the calling thread's current context, as in CUDA. A table is never changed once it
// is filled; any number of threads may use it.
#ifndef KVQ_KERNELS_CUDA_DRIVER_H
#define KVQ_KERNELS_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint64_t kvq_gpu_ptr; // address in device memory; the same number as the pointer there
struct kvq_gpu_context;
struct kvq_gpu_module;
struct kvq_gpu_function;
struct kvq_gpu_stream; // NULL is the default stream
struct kvq_gpu_event;
struct kvq_gpu_graph;
struct kvq_gpu_exec;             // a graph made ready to run
typedef uint64_t kvq_gpu_memory; // physical memory, to be mapped at reserved addresses

struct kvq_gpu_uuid {
    uint8_t bytes[16];
};

// Handles that another process of the same machine opens.
struct kvq_gpu_ipc_memory {
    uint8_t bytes[64];
};
struct kvq_gpu_ipc_event {
    uint8_t bytes[64];
};

struct kvq_gpu_location {
    int type; // KVQ_GPU_LOCATION_DEVICE
    int id;   // the device
};

// What memory_create makes. Zeros where nothing is said.
struct kvq_gpu_allocation {
    int type;         // KVQ_GPU_ALLOCATION_PINNED
    int handle_types; // in which it can be exported: KVQ_GPU_HANDLE_FD or 0
    struct kvq_gpu_location location;
    void *platform;
    uint8_t compression;
    uint8_t rdma;
    uint16_t usage;
    uint8_t reserved[4];
};

struct kvq_gpu_access {
    struct kvq_gpu_location location; // who may
    int flags;                        // do what: KVQ_GPU_ACCESS_..
};

// CUDA's name for the calling thread's own default stream: another stream in each thread.
#define KVQ_GPU_STREAM_OF_THREAD ((struct kvq_gpu_stream *)2)

// Numbers of the driver API that we use.
enum {
    KVQ_GPU_OK = 0,
    KVQ_GPU_INVALID_VALUE = 1,
    KVQ_GPU_OUT_OF_MEMORY = 2,
    KVQ_GPU_NOT_INITIALIZED = 3,
    KVQ_GPU_DEINITIALIZED = 4, // the process is ending
    KVQ_GPU_NO_DEVICE = 100,
    KVQ_GPU_INVALID_DEVICE = 101,
    KVQ_GPU_INVALID_CONTEXT = 201, // also of opening an IPC handle of one's own process
    KVQ_GPU_MAP_FAILED = 205,
    KVQ_GPU_ALREADY_MAPPED = 208,
    KVQ_GPU_SYSTEM = 304,
    KVQ_GPU_INVALID_HANDLE = 400,
    KVQ_GPU_NOT_FOUND = 500,
    KVQ_GPU_NOT_READY = 600,
    // Faults of kernels are sticky: every later call of the process tells them, too.
    KVQ_GPU_ILLEGAL_ADDRESS = 700,
    KVQ_GPU_ALREADY_REGISTERED = 712,
    KVQ_GPU_NOT_REGISTERED = 713,
    KVQ_GPU_INVALID_SPACE = 717,
    KVQ_GPU_LAUNCH_FAILED = 719,
    KVQ_GPU_NOT_PERMITTED = 800,
    KVQ_GPU_NOT_SUPPORTED = 801,
    KVQ_GPU_CAPTURE_UNSUPPORTED = 900,
    KVQ_GPU_CAPTURE_INVALIDATED = 901,
    KVQ_GPU_CAPTURE_UNMATCHED = 903,
    KVQ_GPU_CAPTURE_UNJOINED = 904,
    KVQ_GPU_CAPTURE_ISOLATION = 905,
    KVQ_GPU_CAPTURE_IMPLICIT = 906,
    KVQ_GPU_CAPTURED_EVENT = 907,
    // attributes of a device
    KVQ_GPU_MULTIPROCESSORS = 16,
    KVQ_GPU_CAPABILITY_MAJOR = 75,
    KVQ_GPU_CAPABILITY_MINOR = 76,
    KVQ_GPU_SHARED_PER_BLOCK = 97, // most that a function can be allowed, in bytes
    KVQ_GPU_HAS_HOST_REGISTER = 99,
    KVQ_GPU_HAS_MAPPING = 102,    // memory_create and what goes with it
    KVQ_GPU_HAS_HANDLE_FD = 103,  // its memory can be exported as a file descriptor
    KVQ_GPU_HAS_MEMORY_OPS = 122, // stream_wait64 and stream_write64
    KVQ_GPU_HAS_IPC_EVENTS = 125,
    // attributes of a pointer, and the type that is written
    KVQ_GPU_POINTER_CONTEXT = 1,       // struct kvq_gpu_context *
    KVQ_GPU_POINTER_TYPE = 2,          // unsigned, one of the next two
    KVQ_GPU_TYPE_HOST = 1,             //
    KVQ_GPU_TYPE_DEVICE = 2,           //
    KVQ_GPU_POINTER_BUFFER = 7,        // unsigned long long, never the same again in a process
    KVQ_GPU_POINTER_DEVICE = 9,        // int
    KVQ_GPU_POINTER_LEGACY_IPC = 10,   // int: whether ipc_memory_get takes it
    KVQ_GPU_POINTER_RANGE_START = 11,  // kvq_gpu_ptr
    KVQ_GPU_POINTER_RANGE_BYTES = 12,  // size_t
    KVQ_GPU_POINTER_HANDLE_TYPES = 14, // unsigned long long: as kvq_gpu_allocation.handle_types
    // attributes of a function
    KVQ_GPU_STATIC_SHARED = 1,
    KVQ_GPU_LOCAL_BYTES = 3,
    KVQ_GPU_REGISTERS = 4,
    KVQ_GPU_DYNAMIC_SHARED = 8, // the most that a launch may ask for
    // limits of a context
    KVQ_GPU_LIMIT_STACK = 0, // bytes of a thread's stack; grows when a kernel needs more
    // flags
    KVQ_GPU_STREAM_OWN = 1,      // a stream that does not wait for the default stream
    KVQ_GPU_EVENT_UNTIMED = 2,   // an event that only orders
    KVQ_GPU_EVENT_SHARED = 4,    // one that other processes can open; needs UNTIMED
    KVQ_GPU_CAPTURE_RELAXED = 2, // capturing forbids no call of other threads
    KVQ_GPU_WAIT_AT_LEAST = 0,   // of stream_wait64: cyclic, (int64_t)(*at - value) >= 0
    KVQ_GPU_HOST_PORTABLE = 1,   // of host_alloc and host_register: for all contexts
    KVQ_GPU_HOST_MAPPED = 2,     // device addresses for it, by host_device
    KVQ_GPU_IPC_LAZY_PEER = 1,   // of ipc_memory_open; CUDA wants it
    // of physical memory
    KVQ_GPU_ALLOCATION_PINNED = 1,
    KVQ_GPU_LOCATION_DEVICE = 1,
    KVQ_GPU_HANDLE_FD = 1,
    KVQ_GPU_GRANULARITY_MINIMUM = 0,
    KVQ_GPU_GRANULARITY_RECOMMENDED = 1,
    KVQ_GPU_ACCESS_NONE = 0,
    KVQ_GPU_ACCESS_READ = 1,
    KVQ_GPU_ACCESS_READ_WRITE = 3,
    // what stream_capturing tells
    KVQ_GPU_CAPTURE_NONE = 0,
    KVQ_GPU_CAPTURE_ACTIVE = 1,
    KVQ_GPU_CAPTURE_BROKEN = 2, // to be ended; gives no graph
};

// X(field, symbol of the driver's library, arguments). All return an int, 0 for success.
// clang-format off
#define KVQ_GPU_CALLS(X)                                                                           \
    X(init, cuInit, (unsigned flags))                                                              \
    X(version, cuDriverGetVersion, (int *version))                                                 \
    X(error_name, cuGetErrorName, (int result, const char **name))                                 \
    X(error_text, cuGetErrorString, (int result, const char **text))                               \
    X(device_count, cuDeviceGetCount, (int *count))                                                \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                         \
    X(device_name, cuDeviceGetName, (char *name, int bytes, int device))                           \
    X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))             \
    X(device_memory, cuDeviceTotalMem_v2, (size_t *bytes, int device))                             \
    X(context_retain, cuDevicePrimaryCtxRetain, (struct kvq_gpu_context **context, int device))    \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (int device))                                 \
    X(context_set, cuCtxSetCurrent, (struct kvq_gpu_context *context))                             \
    X(context_get, cuCtxGetCurrent, (struct kvq_gpu_context **context))                            \
    X(context_device, cuCtxGetDevice, (int *device))                                               \
    X(context_sync, cuCtxSynchronize, (void))                                                      \
    X(module_load, cuModuleLoadData, (struct kvq_gpu_module **module, const void *image))          \
    X(module_unload, cuModuleUnload, (struct kvq_gpu_module *module))                              \
    X(module_function, cuModuleGetFunction, (struct kvq_gpu_function **function,                   \
                                             struct kvq_gpu_module *module, const char *name))     \
    X(function_get, cuFuncGetAttribute, (int *value, int attribute,                                \
                                         struct kvq_gpu_function *function))                       \
    X(function_set, cuFuncSetAttribute, (struct kvq_gpu_function *function, int attribute,         \
                                         int value))                                               \
    X(limit_get, cuCtxGetLimit, (size_t *value, int limit))                                        \
    X(limit_set, cuCtxSetLimit, (int limit, size_t value))                                         \
    X(function_blocks, cuOccupancyMaxActiveBlocksPerMultiprocessor,                                \
      (int *blocks, struct kvq_gpu_function *function, int threads, size_t shared))                \
    X(launch, cuLaunchKernel, (struct kvq_gpu_function *function, unsigned grid_x,                 \
                               unsigned grid_y, unsigned grid_z, unsigned block_x,                 \
                               unsigned block_y, unsigned block_z, unsigned shared,                \
                               struct kvq_gpu_stream *stream, void **args, void **extra))          \
    X(memory_info, cuMemGetInfo_v2, (size_t *free, size_t *total))                                 \
    X(memory_alloc, cuMemAlloc_v2, (kvq_gpu_ptr *at, size_t bytes))                                \
    X(memory_free, cuMemFree_v2, (kvq_gpu_ptr at))                                                 \
    X(host_alloc, cuMemHostAlloc, (void **at, size_t bytes, unsigned flags))                       \
    X(host_free, cuMemFreeHost, (void *at))                                                        \
    X(copy_in, cuMemcpyHtoDAsync_v2, (kvq_gpu_ptr to, const void *from, size_t bytes,              \
                                      struct kvq_gpu_stream *stream))                              \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, kvq_gpu_ptr from, size_t bytes,                   \
                                       struct kvq_gpu_stream *stream))                             \
    X(copy_device, cuMemcpyDtoDAsync_v2, (kvq_gpu_ptr to, kvq_gpu_ptr from, size_t bytes,          \
                                          struct kvq_gpu_stream *stream))                          \
    X(fill8, cuMemsetD8Async, (kvq_gpu_ptr to, unsigned char value, size_t count,                  \
                               struct kvq_gpu_stream *stream))                                     \
    X(fill32, cuMemsetD32Async, (kvq_gpu_ptr to, unsigned value, size_t count,                     \
                                 struct kvq_gpu_stream *stream))                                   \
    X(stream_create, cuStreamCreate, (struct kvq_gpu_stream **stream, unsigned flags))             \
    X(stream_destroy, cuStreamDestroy_v2, (struct kvq_gpu_stream *stream))                         \
    X(stream_sync, cuStreamSynchronize, (struct kvq_gpu_stream *stream))                           \
    X(stream_query, cuStreamQuery, (struct kvq_gpu_stream *stream))                                \
    X(stream_wait, cuStreamWaitEvent, (struct kvq_gpu_stream *stream,                              \
                                       struct kvq_gpu_event *event, unsigned flags))               \
    X(stream_wait64, cuStreamWaitValue64_v2, (struct kvq_gpu_stream *stream, kvq_gpu_ptr at,       \
                                              uint64_t value, unsigned flags))                     \
    X(stream_write64, cuStreamWriteValue64_v2, (struct kvq_gpu_stream *stream, kvq_gpu_ptr at,     \
                                                uint64_t value, unsigned flags))                   \
    X(event_create, cuEventCreate, (struct kvq_gpu_event **event, unsigned flags))                 \
    X(event_destroy, cuEventDestroy_v2, (struct kvq_gpu_event *event))                             \
    X(event_record, cuEventRecord, (struct kvq_gpu_event *event, struct kvq_gpu_stream *stream))   \
    X(event_query, cuEventQuery, (struct kvq_gpu_event *event))                                    \
    X(event_sync, cuEventSynchronize, (struct kvq_gpu_event *event))                               \
    X(event_elapsed, cuEventElapsedTime, (float *milliseconds, struct kvq_gpu_event *from,         \
                                          struct kvq_gpu_event *to))                               \
    X(capture_begin, cuStreamBeginCapture_v2, (struct kvq_gpu_stream *stream, int mode))           \
    X(capture_end, cuStreamEndCapture, (struct kvq_gpu_stream *stream,                             \
                                        struct kvq_gpu_graph **graph))                             \
    X(graph_ready, cuGraphInstantiateWithFlags, (struct kvq_gpu_exec **exec,                       \
                                                 struct kvq_gpu_graph *graph,                      \
                                                 unsigned long long flags))                        \
    X(graph_launch, cuGraphLaunch, (struct kvq_gpu_exec *exec, struct kvq_gpu_stream *stream))     \
    X(exec_destroy, cuGraphExecDestroy, (struct kvq_gpu_exec *exec))                               \
    X(graph_destroy, cuGraphDestroy, (struct kvq_gpu_graph *graph))                                \
    X(device_uuid, cuDeviceGetUuid_v2, (struct kvq_gpu_uuid *uuid, int device))                    \
    X(memory_granularity, cuMemGetAllocationGranularity,                                           \
      (size_t *bytes, const struct kvq_gpu_allocation *what, int option))                          \
    X(memory_create, cuMemCreate, (kvq_gpu_memory *memory, size_t bytes,                           \
                                   const struct kvq_gpu_allocation *what,                          \
                                   unsigned long long flags))                                      \
    X(memory_release, cuMemRelease, (kvq_gpu_memory memory))                                       \
    X(memory_retain, cuMemRetainAllocationHandle, (kvq_gpu_memory *memory, void *at))              \
    X(memory_export, cuMemExportToShareableHandle, (void *handle, kvq_gpu_memory memory,           \
                                                    int type, unsigned long long flags))           \
    X(memory_import, cuMemImportFromShareableHandle, (kvq_gpu_memory *memory, void *handle,        \
                                                      int type))                                   \
    X(address_reserve, cuMemAddressReserve, (kvq_gpu_ptr *at, size_t bytes, size_t alignment,      \
                                             kvq_gpu_ptr wanted, unsigned long long flags))        \
    X(address_free, cuMemAddressFree, (kvq_gpu_ptr at, size_t bytes))                              \
    X(memory_map, cuMemMap, (kvq_gpu_ptr at, size_t bytes, size_t offset, kvq_gpu_memory memory,   \
                             unsigned long long flags))                                            \
    X(memory_unmap, cuMemUnmap, (kvq_gpu_ptr at, size_t bytes))                                    \
    X(memory_access, cuMemSetAccess, (kvq_gpu_ptr at, size_t bytes,                                \
                                      const struct kvq_gpu_access *access, size_t count))          \
    X(ipc_memory_get, cuIpcGetMemHandle, (struct kvq_gpu_ipc_memory *handle, kvq_gpu_ptr at))      \
    X(ipc_memory_open, cuIpcOpenMemHandle_v2, (kvq_gpu_ptr *at,                                    \
                                               struct kvq_gpu_ipc_memory handle,                   \
                                               unsigned flags))                                    \
    X(ipc_memory_close, cuIpcCloseMemHandle, (kvq_gpu_ptr at))                                     \
    X(ipc_event_get, cuIpcGetEventHandle, (struct kvq_gpu_ipc_event *handle,                       \
                                           struct kvq_gpu_event *event))                           \
    X(ipc_event_open, cuIpcOpenEventHandle, (struct kvq_gpu_event **event,                         \
                                             struct kvq_gpu_ipc_event handle))                     \
    X(pointer_get, cuPointerGetAttribute, (void *value, int attribute, kvq_gpu_ptr at))            \
    X(address_range, cuMemGetAddressRange_v2, (kvq_gpu_ptr *base, size_t *bytes, kvq_gpu_ptr at))  \
    X(host_register, cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))               \
    X(host_unregister, cuMemHostUnregister, (void *at))                                            \
    X(host_device, cuMemHostGetDevicePointer_v2, (kvq_gpu_ptr *device, void *at, unsigned flags))  \
    X(launch_host, cuLaunchHostFunc, (struct kvq_gpu_stream *stream, void (*function)(void *),     \
                                      void *data))                                                 \
    X(stream_capturing, cuStreamIsCapturing, (struct kvq_gpu_stream *stream, int *status))
// clang-format on

struct kvq_gpu_driver {
    const char *name;    // what it is, for messages: the library's name, or "emulator"
    void *library;       // of dlopen; NULL if none
    bool kernels_inside; // the kernels are part of the program: module_load takes no image
// A declarator's name and its parameters cannot stand in parentheses of their own.
#define KVQ_GPU_FIELD(field, symbol, args) int(*field) args; // NOLINT(bugprone-macro-parentheses)
    KVQ_GPU_CALLS(KVQ_GPU_FIELD)
#undef KVQ_GPU_FIELD
};

// A library with this symbol has the kernels inside.
#define KVQ_GPU_KERNELS_INSIDE "kvq_gpu_kernels_inside"

// Opens the driver's library (NULL means libcuda.so.1) and fills the table. 0, or -1 with a
// sentence in text (what is missing and what to do), and then there is nothing to close. Needs no
// GPU and initializes nothing: that is driver->init.
int kvq_gpu_driver_open(struct kvq_gpu_driver *driver, const char *library, char *text, size_t n);
void kvq_gpu_driver_close(struct kvq_gpu_driver *driver); // a zeroed table is fine

// 0 if the driver can load kernels that CUDA's compiler of that major version made (0: nobody made
// any); else -1, and a sentence in text that says which driver can. Needs no GPU.
int kvq_gpu_driver_check(const struct kvq_gpu_driver *driver, int compiled_by, char *text,
                         size_t n);

// The device's name for people, as nvidia-smi -L prints it: "GPU-" and its UUID, or "MIG-" and that
// of the part of a GPU that it is, which device_name tells by the word MIG.
enum { KVQ_GPU_PLACE_BYTES = 48 };
void kvq_gpu_place(const struct kvq_gpu_uuid *uuid, const char *device_name,
                   char place[KVQ_GPU_PLACE_BYTES]);
// Whether both name one device: either prefix will do, in either case of letters.
bool kvq_gpu_place_is(const char *place, const char *other);

// Writes "what: NAME (what it means)" for a result that is not KVQ_GPU_OK. Returns -1.
int kvq_gpu_fault(const struct kvq_gpu_driver *driver, int result, const char *what, char *text,
                  size_t n);

#ifdef __cplusplus
}
#endif

#endif
