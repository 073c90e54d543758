// SPDX-License-Identifier: Apache-2.0
//
// What the core is given when it is opened, and what all its rooms do with that: bookkeeping
// memory, events, texts.
#ifndef KVQ_DAEMON_CORE_BASE_BASE_H
#define KVQ_DAEMON_CORE_BASE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/core/base/event_kinds.h"
#include "kernels/kernels.h"
#include "proto/limits.h"
#include "proto/shm.h"
#include "proto/status.h"

struct kvq__core;
struct kvq__gpu;
struct kvq__table_memory;

// Memory of one extent. `base` is 64-byte aligned; `fd` is the giver's (a memfd, or -1).
struct kvq__memory {
    uint8_t *base;
    size_t bytes;
    int fd;
    bool huge;       // in explicit huge pages
    uint64_t handle; // the giver's own
};

// Where memory comes from. Called on the poller thread, but for back().
struct kvq__memory_ops {
    void *context;
    // Zeroed memory for one extent. 0, or KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
    int (*acquire)(void *context, size_t bytes, struct kvq__memory *memory);
    // Where pages take long to be had. reserve: as acquire, but without pages. back: takes those of
    // some bytes from `at` on, if they are not there; any thread. 0 or KVQ_E_NO_MEMORY. Both or
    // none.
    int (*reserve)(void *context, size_t bytes, struct kvq__memory *memory);
    int (*back)(const struct kvq__memory *memory, uint64_t at, uint64_t bytes);
    // Zeroes an extent before another namespace gets it. The pages may go back to the system.
    void (*zero)(void *context, struct kvq__memory *memory);
    void (*release)(void *context, struct kvq__memory *memory);
    // Zeroed bookkeeping memory, aligned to 64 bytes, or NULL. deallocate accepts NULL. Without
    // these two the core takes it from the system.
    void *(*allocate)(void *context, size_t bytes);
    void (*deallocate)(void *context, void *memory, size_t bytes);
    // For places where acquire may take long. take: as acquire, but returns KVQ_E_BUSY instead of
    // waiting while another thread makes extents. want: says how many extents somebody waits for.
    // made: returns a number that changes once these extents are there, or as many of them as there
    // will be. All three or none.
    int (*take)(void *context, size_t bytes, struct kvq__memory *memory);
    void (*want)(void *context, uint32_t extents);
    uint32_t (*made)(void *context);
};

// A format of the configuration. Its rows have passed kvq_format_check. Users read the names of the
// rows; within a core, rows of one name are the same row.
struct kvq__layer_range {
    uint32_t first, last;
    struct kvq_format row;
};
struct kvq__own_format {
    char name[KVQ_FORMAT_NAME]; // no name of the table or that kvq_format_parse knows
    bool has_rest;
    struct kvq_format rest; // of layers that are in no range
    uint32_t n_ranges;      // they do not overlap
    struct kvq__layer_range ranges[KVQ_MAX_FORMAT_RANGES];
};

// Hard limits of a namespace.
//   HOST_BYTES    of its blocks in host memory; a block that several sessions share counts once
//   DEVICE_BYTES  of its blocks on all GPUs together, likewise
//   DISK_BYTES    of its blocks in the store
//   SESSIONS      in memory or parked, each shard by itself; not those that only the store has
//   TABLE_BYTES   of host memory for everything besides blocks: sessions, layers, page tables,
//                 token ids
enum kvq__limit {
    KVQ__HOST_BYTES,
    KVQ__DEVICE_BYTES,
    KVQ__DISK_BYTES,
    KVQ__SESSIONS,
    KVQ__TABLE_BYTES,
    KVQ__LIMITS
};
struct kvq__quota {
    uint64_t limit[KVQ__LIMITS]; // 0: only the size of the place limits it
};

// Limits of a namespace that were set at run time, in place of the configuration's.
struct kvq__override {
    char ns[KVQ_NAME_BYTES];
    uint32_t set; // bits 1 << enum kvq__limit of the limits that were set
    struct kvq__quota quota;
};

enum { KVQ__SMALLEST_EXTENT = 2 << 20 }; // of the host, as long as a huge page

struct kvq__core_config {
    uint64_t pool_bytes;   // budget of all extents
    uint64_t extent_bytes; // of the largest, a multiple of 2 MiB; 0 = 64 MiB. All pools have the
    // same, so that a block that fits into one place fits into others
    uint32_t release_work; // sheets, blocks and id parts that a turn frees at most; 0 = 2048
    uint32_t seal_pages;   // no new ones, given to an index of prefixes in a turn; 0 = 512
    uint32_t fork_work;    // sheets, id parts and pages that a FORK visits in a turn; 0 = 8192
    uint32_t restore_work; // pages that a restore visits in a turn, and KiB that it backs; 0 = 4096
    uint64_t keep_ns;      // how long a named session stays after its last close; 0 = for ever
    uint32_t workers;      // threads that run jobs; attention is cut into pieces for so many
    uint8_t path;          // enum kvq_path for sessions that leave it to the daemon
    bool saves;            // there is a store that saves sessions and fetches parked ones (saved.h)
    uint64_t run;          // differs from run to run; tells the saves and the handles of one run
                           // from another's
    uint64_t stall_ns;     // a client that stalls for so long is reported; 0 = 2 s
    struct kvq__quota quota; // of namespaces that are not configured
    uint64_t partial_bytes;  // scratch of one queue for partial results; 0 = 20 MiB
    const struct kvq_kernels *kernels;
    struct kvq__gpu *const *gpus; // stay there until the core is closed; sessions may live on them
    uint32_t n_gpus;              // at most KVQ_MAX_GPUS
    uint64_t work_stream_bytes;   // a client's memory for arguments, on each GPU; 0 = 16 MiB
    uint64_t work_stream_workspace; // a client's memory for partial results, likewise; 0 = 64 MiB
    const struct kvq__own_format *formats; // stay there until the core is closed
    uint32_t n_formats;
    uint8_t prefix_key[32];  // random key of the hashes of prefixes
    uint64_t evict_idle_ns;  // a session is evicted only if it was idle for so long (evict.h)
    uint64_t park_idle_ns;   // sessions idle for so long go to disk; 0 = never
    uint64_t pack_error_ns;  // between two packed units that are compared; 0 = never (pack_error.h)
    uint32_t evict_above;    // percent of a pool above which idle sessions leave it; 0, 100 = never
    uint64_t prefix_keep_ns; // how long a prefix stays without a session; 0 = while there is room
    struct kvq__memory_ops memory;
    void *context; // for the callbacks below; they run on the poller thread
    // Any may be NULL.
    void (*event)(void *context, const struct kvq__event *event);
    // The store has work: kvq__park_next (saved.h) returns it.
    void (*wants)(void *context);
    // A GPU has faulted: its memory cannot be trusted, and its work never ends. Called once. The
    // process should end.
    void (*fault)(void *context, const char *place, const char *text);
    // No request uses the buffer any more: its memory may be unmapped. Called once for each buffer
    // that was added, by kvq__buffer_remove, kvq__client_detach, kvq__request_continue or
    // kvq__core_poll.
    void (*buffer_gone)(void *context, void *owner, uint32_t buffer);
    // The same for the memory of a page table, which its address names.
    void (*table_gone)(void *context, uint64_t client, const struct kvq__table_memory *memory);
    // Codebooks by name, for formats "NAME@CODEBOOK". codebook fills *book for one layer and counts
    // a reference, *hold; codebook_share counts another one, codebook_release drops one. The tables
    // live until the last reference is dropped. codebook returns a KVQ_E code and a text
    // (KVQ_TEXT_BYTES / 2) if there is no such codebook, or if it was made for another format or
    // shape. All three or none.
    int (*codebook)(void *context, const char *name, uint32_t layer,
                    const struct kvq_format *format, const struct kvq_shape *shape,
                    struct kvq_book *book, void **hold, char *text);
    void (*codebook_share)(void *context, void *hold);
    void (*codebook_release)(void *context, void *hold);
    // A number of the codebook's tables: the same number means the same tables, also in other runs
    // of the daemon. NULL if the three are NULL.
    uint64_t (*codebook_id)(void *context, void *hold);
};

// Who asks.
enum { KVQ__NO_UID = UINT32_MAX }; // somebody who comes from another machine is no user here
struct kvq__peer {
    uint32_t uid, pid;
    uint8_t key[32];               // that somebody from another machine has shown; else zeros
    uint32_t gids[KVQ_MAX_GROUPS]; // primary group first
    uint32_t n_gids;
    bool admin; // may do what is asked with everything, not only with its own
};

// A namespace of the configuration. Others come into being as "uid-N" for user N.
struct kvq__namespace_config {
    const char *name;
    struct kvq__quota quota;
    const uint32_t *uids, *gids; // who may use it; admins always may
    uint32_t n_uids, n_gids;
    const char *const *share_with; // namespaces that may share its prefixes; "*": all
    uint32_t n_share_with;
};

// What may change while the core runs; as the fields of the same names in struct kvq__core_config.
struct kvq__core_settings {
    uint64_t keep_ns, prefix_keep_ns, evict_idle_ns, park_idle_ns, pack_error_ns;
    uint32_t evict_above;
    uint8_t path;
    struct kvq__quota quota;
    const struct kvq__namespace_config *namespaces; // all of the configuration
    uint32_t n_namespaces;
};

// ---- For the core's rooms ----

static inline uint64_t kvq__min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}
static inline uint64_t kvq__max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

// Takes bookkeeping memory from the system if `memory` has no functions for it.
void kvq__memory_defaults(struct kvq__memory_ops *memory);
void *kvq__allocate(struct kvq__core *core, size_t bytes); // zeroed; NULL if there is none
void kvq__deallocate(struct kvq__core *core, void *memory, size_t bytes);
void kvq__event(struct kvq__core *core, enum kvq__event_kind kind, const char *ns,
                const char *session, uint64_t client, const char *text);
// Writes a text (KVQ_TEXT_BYTES; NULL is accepted) and returns code.
int kvq__fail(char *text, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
