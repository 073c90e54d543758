// SPDX-License-Identifier: Apache-2.0
//
// What the daemon is told at start: one INI file, KVQD_* environment variables and flags, all
// with the same names. Flags win over the environment, that over the file, that over defaults.
// Every value is foreign input: it is checked, and what is refused is told with its place, its
// value and what is allowed. Names that nobody knows are refused with the nearest that is known.
//
//     # kvqd.conf                     environment              flag
//     pool_bytes = 30gb               KVQD_POOL_BYTES=30gb     --pool-bytes 30gb
//     [namespace team-a]              (namespaces stand in the file only)
//     uids = 1000, 1001
//     [format mymix]                  (formats likewise)
//     k = oscar2-g64
//     v = innerq-hybrid
//     [key alice]                     (keys likewise)
//     public = 64 hexadecimal digits
//     role = operate
//
// Files conf.d/*.conf beside the file are read after it, in the order of their names: what a later
// one says holds.
#ifndef KVQ_DAEMON_CONFIG_CONFIG_H
#define KVQ_DAEMON_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/core/base/base.h"
#include "proto/limits.h"

struct kvq_config_ids {
    uint32_t n;
    uint32_t id[KVQ_MAX_NAMESPACE_IDS];
};

// A namespace that several users may use, or whose limits differ from the default. Namespaces
// that are not configured: "uid-N" for each user N, without limits of their own.
struct kvq_config_namespace {
    char name[KVQ_NAME_BYTES];
    struct kvq_config_ids uids, gids;
    uint64_t host_bytes, device_bytes, disk_bytes; // 0: none but what the place has
    uint64_t max_sessions;                         // see kvq__config_sessions
    uint64_t table_bytes;                          // 0: by the blocks that it may have
    uint32_t n_share_with; // namespaces that may share its prefixes; "*": all
    char share_with[KVQ_MAX_SHARE_WITH][KVQ_NAME_BYTES];
    uint64_t set; // which keys the section held
};

// What a [format NAME] section says, as text; what it means is in own_formats.
enum {
    KVQ_CONFIG_FORMAT_BASE,
    KVQ_CONFIG_FORMAT_K,
    KVQ_CONFIG_FORMAT_V,
    KVQ_CONFIG_FORMAT_LAYERS, // in own_formats alone
};
struct kvq_config_format {
    char names[KVQ_CONFIG_FORMAT_LAYERS][KVQ_FORMAT_NAME]; // of base, k and v; empty: not said
    char stages[512];                                      // "stage=value:stage=value"
    uint64_t stages_set;                                   // by kvq_format_stage()
    char composition[768]; // k, v and stages as one name, the row's source
};

// What somebody may do with what is everybody's. Each role may do what the one before it may.
enum kvq__role {
    KVQ__ROLE_NONE,    // nothing: has sessions of his own alone
    KVQ__ROLE_READ,    // sees everything
    KVQ__ROLE_OPERATE, // saves, moves and ends sessions, kicks clients
    KVQ__ROLE_ADMIN,   // changes limits and the configuration, ends the daemon
};

// Somebody who comes from another machine, [key NAME].
struct kvq_config_key {
    char name[KVQ_NAME_BYTES];
    uint8_t public_key[32];
    uint8_t role; // enum kvq__role
};

enum { KVQ_CONFIG_PATH = 256, KVQ_CONFIG_OPTIONS = 64, KVQ_CONFIG_GPUS = 1024 };

// The option backend, in the order of its words.
enum kvq__backend {
    KVQ__BACKEND_AUTO, // GPUs where there are some that can be used
    KVQ__BACKEND_CPU,
    KVQ__BACKEND_GPU,
    KVQ__BACKEND_EMU, // the software driver of a test build
};

// Where an option's value came from, least to most important.
enum kvq_config_source {
    KVQ_FROM_DEFAULT,
    KVQ_FROM_FILE,
    KVQ_FROM_ENVIRONMENT,
    KVQ_FROM_FLAG,
    KVQ_FROM_COMMAND, // kvqctl config set
};

struct kvq_config {
    char runtime_dir[KVQ_CONFIG_PATH];
    uint64_t runtime_mode;
    char runtime_group[KVQ_CONFIG_PATH]; // "": leave it as it is
    uint64_t pool_bytes;                 // 0: resolved to a quarter of the memory (machine.h)
    uint64_t extent_bytes;               // of the largest; 0: kvq__usual_extent, with GPUs 64 MiB
    uint64_t host_extent_bytes;          // resolved from it, without GPUs,
    uint64_t gpu_extent_bytes;           // and with some: of the host, too
    uint64_t huge_pages;                 // enum kvq__huge_pages
    uint64_t backend;                    // enum kvq__backend
    char gpu_driver[KVQ_CONFIG_PATH];    // "": libcuda.so.1
    char gpus[KVQ_CONFIG_GPUS];          // UUIDs with commas between; "": all
    uint64_t gpu_bytes;                  // on each; 0: half of what is free at start
    uint64_t workers;                    // 0: resolved to usable CPUs - 1, at least 1
    bool pin;
    uint64_t spin_us;
    uint64_t keep_seconds;
    uint64_t prefix_keep_seconds; // 0: as long as there is room
    uint64_t drain_ms;
    uint64_t max_clients;
    // Limits of namespaces that are not configured; 0: none.
    uint64_t host_bytes, device_bytes, disk_bytes, max_sessions;
    uint64_t table_bytes;  // 0: by the blocks that they may have
    uint64_t client_bytes; // buffers of one client
    uint64_t buffer_bytes; // of all clients; 0: resolved to half of the memory
    uint64_t fast;         // 1: sessions that leave the path to the daemon get the fast one
    char codebook_dir[KVQ_CONFIG_PATH]; // "": no codebooks
    char storage_dir[KVQ_CONFIG_PATH];  // "": nothing is saved
    uint64_t storage_bytes;             // of all its files; 0: no cap
    uint64_t save_idle_seconds;         // 0: sessions are not saved for being idle
    uint64_t evict_idle_ms;
    uint64_t evict_above;       // percent
    uint64_t park_idle_seconds; // 0: only for room
    uint64_t pack_error_ms;     // 0: never
    bool save_on_drain;
    char remote_endpoint[KVQ_CONFIG_PATH]; // "": no remote store; then the others are empty, too
    char remote_bucket[64];
    char remote_prefix[KVQ_CONFIG_PATH];
    char remote_region[64];
    char remote_ca_file[KVQ_CONFIG_PATH]; // "": the system's
    bool remote_virtual_host;
    char remote_keys_file[KVQ_CONFIG_PATH]; // "": AWS_* of the environment
    char remote_keys_section[64];
    uint64_t remote_part_bytes, remote_connections, remote_stall_seconds;
    struct kvq_config_ids read_uids, read_gids, operate_uids, operate_gids, admin_uids, admin_gids;
    char control_address[KVQ_CONFIG_PATH];  // "": the Unix socket alone
    char control_key_file[KVQ_CONFIG_PATH]; // "": none; then control_address is, too
    bool http;
    char http_address[KVQ_CONFIG_PATH]; // "": the Unix socket alone
    uint64_t log_level;                 // enum kvq_log_level
    char log_file[KVQ_CONFIG_PATH];

    uint32_t n_namespaces;
    struct kvq_config_namespace namespaces[KVQ_MAX_NAMESPACES];
    uint32_t n_formats;
    struct kvq_config_format formats[KVQ_MAX_OWN_FORMATS];
    struct kvq__own_format own_formats[KVQ_MAX_OWN_FORMATS]; // checked, in the same order
    uint32_t n_keys;
    struct kvq_config_key keys[KVQ_MAX_KEYS];

    uint8_t source[KVQ_CONFIG_OPTIONS]; // enum kvq_config_source, in the order of the table
    // KVQ_FROM_FILE: its name in conf.d; "": the file itself.
    char source_file[KVQ_CONFIG_OPTIONS][KVQ_CONFIG_NAME];

    // Flags without a name in file and environment.
    char file[KVQ_CONFIG_PATH]; // --config or KVQD_CONFIG; "": none
    uint32_t n_more_files;      // in conf.d
    int ready_fd;               // -1: none
    int lifetime_fd;            // -1: none
    bool help, version, print;  // asked for; nothing else is looked at
};

// Fills config from defaults, the file that flags or environment name, environment and flags.
// `environment` is like environ. 0, or KVQ_E_INVALID / KVQ_E_SYSTEM with a sentence in text
// (KVQ_TEXT_BYTES). With help or version asked for, the rest is left at defaults.
int kvq__config_load(struct kvq_config *config, int argc, char *const *argv,
                     char *const *environment, char *text);

// Whether file, environment or flags gave an option a value.
bool kvq__config_was_given(const struct kvq_config *config, const char *name);
// What buffer_bytes = 0 stands for: half of the memory, or what one client was explicitly allowed,
// but never more than all of it.
uint64_t kvq__usual_buffer_bytes(const struct kvq_config *config, uint64_t memory);
// Whether they gave buffer_bytes a value of their own: not 0, for which kvqd chooses one.
struct kvq__machine;
bool kvq__config_sets_buffer_bytes(const struct kvq_config *config,
                                   const struct kvq__machine *machine);

// The steps of the above, for tests: `name` stands for the file in complaints. `contents` ends
// with a NUL. Several files are parsed one after the other into one configuration; source_file is
// the name that options get (struct kvq_config).
void kvq__config_defaults(struct kvq_config *config, char *const *environment);
int kvq__config_parse(struct kvq_config *config, const char *name, const char *source_file,
                      const char *contents, char *text);

// Replaces values that mean "choose for me", and checks what depends on several options.
int kvq__config_resolve(struct kvq_config *config, char *text);

// Whether a start with it would fail, as far as that can be told before: KVQ_E_INVALID with a text.
// Of a resolved configuration. Reads the machine's memory.
int kvq__config_check(const struct kvq_config *config, char *text);
// Whether the files of keys and certificates that it names can be read now, and its group is there:
// KVQ_E_INVALID with a text. A part of its own, since a start may come again for what is late, and
// others may look at a configuration.
int kvq__config_check_files(const struct kvq_config *config, char *text);
// The part of it that is about memory which the machine never has. Of the pool and a control
// group's limit only a start can tell: huge pages that were set aside do not count there.
int kvq__config_check_memory(const struct kvq_config *config, char *text);

// Texts for people, in size bytes, NUL included: --help, and the configuration in effect as a
// file that could be used again.
void kvq__config_help(char *out, size_t size);
void kvq__config_print(const struct kvq_config *config, char *out, size_t size);

// The format of the file that a session's format, maybe with "@CODEBOOK", is; NULL: it is none.
const struct kvq__own_format *kvq__config_own_format(const struct kvq_config *config,
                                                     const char *name);

// A role's word.
const char *kvq__role_name(enum kvq__role role);
// The role that the options give a user, or one of its groups: the highest of them.
enum kvq__role kvq__config_role(const struct kvq_config *config, uint32_t uid, const uint32_t *gids,
                                uint32_t n_gids);
// The section of a key (32 bytes), or of that name. NULL: there is none.
const struct kvq_config_key *kvq__config_key_of(const struct kvq_config *config,
                                                const uint8_t *public_key);
const struct kvq_config_key *kvq__config_key_find(const struct kvq_config *config,
                                                  const char *name);

// What extent_bytes = 0 stands for: as small as 1,024 of them make a pool, 8 to 64 MiB.
uint64_t kvq__usual_extent(uint64_t pool_bytes);

// CPUs this process may run on.
uint32_t kvq__usable_cpus(void);
// What workers = 0 stands for: all of few CPUs. Of many, one stays for an engine that waits awake.
uint32_t kvq__usual_workers(uint32_t cpus);

// How many sessions the namespace may have: what its section says, or else what holds for those
// that have none. 0: no limit.
uint64_t kvq__config_sessions(const struct kvq_config *config,
                              const struct kvq_config_namespace *ns);

#endif
