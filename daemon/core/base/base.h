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

// Where memory comes from. Called on the poller thread.
struct kvq__memory_ops {
    void *context;
    // Zeroed memory for one extent. 0, or KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
    int (*acquire)(void *context, size_t bytes, struct kvq__memory *memory);
    // Zeroes an extent before it changes its owner (and may give its pages back meanwhile).
    void (*zero)(void *context, struct kvq__memory *memory);
    void (*release)(void *context, struct kvq__memory *memory);
    // Zeroed bookkeeping memory, aligned to 64 bytes, or NULL. deallocate accepts NULL. Without
    // these two the core takes it from the system.
    void *(*allocate)(void *context, size_t bytes);
    void (*deallocate)(void *context, void *memory, size_t bytes);
    // Where acquire may take long: as acquire, or KVQ_E_BUSY instead of waiting, and then some is
    // being made elsewhere; `want` says for how many extents somebody waits; `made` gives another
    // number once they are there, or as many as there will be. All three or none.
    int (*take)(void *context, size_t bytes, struct kvq__memory *memory);
    void (*want)(void *context, uint32_t extents);
    uint32_t (*made)(void *context);
};

// A format of the configuration. Its rows have passed kvq_format_check; their names are what users
// read, and mean the same in all formats of a core.
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

// Hard limits of a namespace. Its blocks in the host's memory and in that of GPUs (of all of them
// together) count by their bytes, each once however many sessions share it; what it has on disk
// counts by the bytes of the blocks there. Sessions are those in memory, each shard by itself, and
// parked ones; what is on disk alone is none. Table bytes are all that the host keeps of them
// besides blocks: sessions, layers, page tables, token ids.
enum kvq__limit {
    KVQ__HOST_BYTES,
    KVQ__DEVICE_BYTES,
    KVQ__DISK_BYTES,
    KVQ__SESSIONS,
    KVQ__TABLE_BYTES,
    KVQ__LIMITS
};
struct kvq__quota {
    uint64_t limit[KVQ__LIMITS]; // 0 = none but what the place has
};

// Limits of a namespace that were set at run time, in place of the configuration's.
struct kvq__override {
    char ns[KVQ_NAME_BYTES];
    uint32_t set; // which of them: bits 1 << enum kvq__limit; 0: none
    struct kvq__quota quota;
};

struct kvq__core_config {
    uint64_t pool_bytes;     // budget of all extents
    uint64_t extent_bytes;   // multiple of 2 MiB; 0 = 64 MiB
    uint32_t release_work;   // sheets, blocks and parts of ids given back in a turn; 0 = 2048
    uint32_t fork_work;      // sheets and parts of ids that a FORK shares in a turn; 0 = 8192
    uint64_t keep_ns;        // how long named sessions stay when nobody has them open; 0 = for ever
    uint32_t workers;        // threads that run jobs: decides how finely attention is cut
    uint8_t path;            // enum kvq_path for sessions that leave it to the daemon
    bool saves;              // somebody saves sessions (saved.h), and fetches what is parked
    uint64_t run;            // another number for each run: what is saved is told apart by it
    uint64_t stall_ns;       // a client is told of that stalls for so long; 0 = 2 s
    struct kvq__quota quota; // of namespaces that are not configured
    uint64_t partial_bytes;  // scratch of one queue for partial results; 0 = 8 MiB
    const struct kvq_kernels *kernels;
    struct kvq__gpu *const *gpus; // stay there until the core is closed; sessions may live on them
    uint32_t n_gpus;              // at most KVQ_MAX_GPUS
    uint64_t lane_bytes;          // of a client's memory for work on one of them; 0 = 16 MiB
    uint64_t lane_workspace;      // likewise, for partial results; 0 = 64 MiB
    const struct kvq__own_format *formats; // stay there until the core is closed
    uint32_t n_formats;
    uint8_t prefix_key[32]; // random: what hashes of prefixes are keyed with
    uint64_t evict_idle_ns; // sessions idle for less are not evicted (evict.h)
    uint64_t park_idle_ns;  // sessions idle for so long go to disk; 0 = never
    uint32_t evict_above;   // percent of a pool, above which idle ones go unasked; 0 or 100 = never
    uint64_t prefix_keep_ns; // how long prefixes stay that no session has; 0 = while there is room
    struct kvq__memory_ops memory;
    void *context; // for the callbacks below; they run on the poller thread
    // Any may be NULL.
    void (*event)(void *context, const struct kvq__event *event);
    // There is something for whoever saves sessions: kvq__park_next (saved.h) has it.
    void (*wants)(void *context);
    // A GPU has faulted: nothing on it can be trusted or ended any more. Called once; what it does
    // is the caller's, and ending the process is what there is to do.
    void (*fault)(void *context, const char *place, const char *text);
    // Nothing uses the buffer any more: the memory may be unmapped. Called once for each buffer
    // added, from within kvq__buffer_remove, kvq__client_detach, kvq__request_continue or
    // kvq__core_poll.
    void (*buffer_gone)(void *context, uint64_t client, uint32_t buffer);
    // The same of a page table's memory, by where it lies.
    void (*table_gone)(void *context, uint64_t client, const struct kvq__table_memory *memory);
    // Codebooks by name, for formats "NAME@CODEBOOK": fills *book for one layer, with tables that
    // live until *hold has been given to codebook_release as often as it was got here and given to
    // codebook_share. A KVQ_E code and a text (KVQ_TEXT_BYTES / 2) if there is none, or if it was
    // made for another format or shape. All three or none.
    int (*codebook)(void *context, const char *name, uint32_t layer,
                    const struct kvq_format *format, const struct kvq_shape *shape,
                    struct kvq_book *book, void **hold, char *text);
    void (*codebook_share)(void *context, void *hold);
    void (*codebook_release)(void *context, void *hold);
    // Two codebooks with the same number have the same tables, in other runs of the daemon as
    // well. May be NULL with the three.
    uint64_t (*codebook_id)(void *context, void *hold);
};

// Who asks.
struct kvq__peer {
    uint32_t uid, pid;
    uint32_t gids[KVQ_MAX_GROUPS]; // primary group first
    uint32_t n_gids;
    bool admin; // the daemon's own user or root: may see, drop and kick everything
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

// ---- For the core's rooms ----

// Where the caller gives no bookkeeping memory it is the system's.
void kvq__memory_defaults(struct kvq__memory_ops *memory);
void *kvq__allocate(struct kvq__core *core, size_t bytes); // zeroed; NULL if there is none
void kvq__deallocate(struct kvq__core *core, void *memory, size_t bytes);
void kvq__event(struct kvq__core *core, enum kvq__event_kind kind, const char *ns,
                const char *session, uint64_t client, const char *text);
// Writes a text (KVQ_TEXT_BYTES; NULL is accepted) and returns code.
int kvq__fail(char *text, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
