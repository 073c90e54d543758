/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq.h: the client library of kvqd, the daemon that owns quantized KV caches.
 *
 * An engine connects, opens a queue for each of its threads, registers the memory that its
 * tensors travel in, and opens sessions. Then, for every step of the model:
 *
 *     kvq_step_begin   the sessions of the batch, their token counts, tokens to come
 *     kvq_append_attend  for each layer: K and V in, Q in, attention output and LSE out
 *     kvq_step_end     commits: only now the tokens are part of the session
 *
 * Return values: 0 or a negative KVQ_E code; kvq_error_text() has the details in words. For
 * calls over a batch, the code is that of the request as a whole (then no session was touched),
 * and each entry has a status of its own: one session's failure never fails another.
 *
 * Threads: a kvq_client may be used from any number of threads (calls on it take a lock and
 * are not for the hot path). A kvq_queue belongs to one thread at a time. Calls on different
 * queues run in parallel. One session may be written from one queue at a time.
 *
 * Ownership: what a function gives out through a pointer to pointer is released by the function
 * named in its comment, which also sets the pointer to NULL. Nothing is taken over from the
 * caller: arguments are copied, tensors are read in place until the call (or its ticket) is done.
 *
 * A process that forks must not use the library's objects in the child.
 */
#ifndef KVQ_H
#define KVQ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVQ_API   __attribute__((visibility("default")))
#define KVQ_CHECK __attribute__((warn_unused_result))
#else
#define KVQ_API
#define KVQ_CHECK
#endif

#define KVQ_VERSION_MAJOR 0
#define KVQ_VERSION_MINOR 1
#define KVQ_VERSION_PATCH 0

enum {
    KVQ_OK = 0,
    KVQ_E_INVALID = -1,
    KVQ_E_VERSION = -2,
    KVQ_E_NO_DAEMON = -3,
    KVQ_E_PERMISSION = -4,
    KVQ_E_NO_SESSION = -5,
    KVQ_E_STALE = -6,
    KVQ_E_BUSY = -7,
    KVQ_E_EXISTS = -8,
    KVQ_E_SHAPE = -9,
    KVQ_E_DTYPE = -10,
    KVQ_E_FORMAT = -11,
    KVQ_E_POSITION = -12,
    KVQ_E_BOUNDS = -13,
    KVQ_E_LIMIT = -14,
    KVQ_E_NO_MEMORY = -15,
    KVQ_E_QUOTA = -16,
    KVQ_E_NONFINITE = -17,
    KVQ_E_NO_STEP = -18,
    KVQ_E_INCOMPLETE = -19,
    KVQ_E_ROLLBACK = -20,
    KVQ_E_READ_ONLY = -21,
    KVQ_E_DEADLINE = -22,
    KVQ_E_CANCELLED = -23,
    KVQ_E_DISCONNECTED = -24,
    KVQ_E_EPOCH = -25,
    KVQ_E_PROTOCOL = -26,
    KVQ_E_CREDITS = -27,
    KVQ_E_DRAINING = -28,
    KVQ_E_BUFFER = -29,
    KVQ_E_SYSTEM = -30,
    KVQ_E_UNSUPPORTED = -31,
    KVQ_E_TAKEN = -32,
    KVQ_E_INTERNAL = -33,
    KVQ_E_NO_CLIENT = -34,
    KVQ_E_NO_SPACE = -35,
    KVQ_E_DAMAGED = -36,
    KVQ_E_REMOTE = -37
};

/* One sentence for a code; never NULL. Thread-safe. */
KVQ_API const char *kvq_strerror(int code);

/* What exactly went wrong in the calling thread's last failed call: value, limit, what to do. After
 * a call over a batch that returned 0: what went wrong with the first entry whose status is not 0.
 * Never NULL; valid until the thread's next kvq call. */
KVQ_API const char *kvq_error_text(void);

/* "0.1.0"; of the library, not of the daemon. */
KVQ_API const char *kvq_version(void);

/* ---- Connection ---------------------------------------------------------------------------- */

typedef struct kvq_client kvq_client;

struct kvq_connect_options {
    /* NULL: $KVQ_RUNTIME_DIR, else $XDG_RUNTIME_DIR/kvqd, else /run/kvqd */
    const char *runtime_dir;
    const char *name;    /* for people, e.g. "myengine 1.2"; NULL: the program's name */
    uint32_t timeout_ms; /* for connecting and for control calls; 0: 5000 */
    uint32_t spin_us;    /* longest time to spin before sleeping; 0: adaptive */
};

/* Control calls are those on clients, queues, buffers and sessions. One that ends with
 * KVQ_E_DEADLINE holds nothing: what the daemon makes for it later is given back, though a named
 * session that it created stays, as after kvq_session_close. */

/* options may be NULL. KVQ_E_NO_DAEMON, KVQ_E_PERMISSION, KVQ_E_VERSION, KVQ_E_DRAINING.
 * Release with kvq_disconnect. */
KVQ_API KVQ_CHECK int kvq_connect(const struct kvq_connect_options *options, kvq_client **client);

/* Closes queues, buffers and session handles still open (sessions go by their on_detach).
 * Accepts NULL and pointers to NULL. No other thread may be in a call on the client. */
KVQ_API void kvq_disconnect(kvq_client **client);

struct kvq_daemon_info {
    char version[32];
    char backend[32]; /* "cpu" */
    char isa[32];     /* "avx512" */
    uint64_t epoch;   /* changes with every start of the daemon */
    uint64_t client_id;
    uint32_t protocol;
};
KVQ_API int kvq_daemon_info(kvq_client *client, struct kvq_daemon_info *info);

/* A GPU of the daemon. */
struct kvq_gpu_info {
    char place[48]; /* "GPU-01234567-89ab-cdef-0123-456789abcdef", or "MIG-.." */
    char name[64];  /* for people: "NVIDIA H200" */
};

/* Fills up to `max` elements with the GPUs that sessions can live on, and *n with how many there
 * are; 0 if the daemon works on CPUs alone. Needs no GPU here. */
KVQ_API int kvq_daemon_gpus(kvq_client *client, struct kvq_gpu_info *gpus, uint32_t max,
                            uint32_t *n);

/* After KVQ_E_DISCONNECTED: connects again, opens the client's queues and registers its buffers
 * anew (same kvq_queue, same kvq_buffer, same memory). Returns KVQ_OK if the same daemon run
 * answered and KVQ_E_EPOCH if it was restarted; in both cases the client works again. Session
 * handles are stale in both: open named sessions again by name; those that the daemon still
 * has stand at their last commit. *lost (may be NULL) gets the number of session handles that
 * this client held. Open tickets and steps end with KVQ_E_CANCELLED. If it fails otherwise (no
 * daemon yet, ...), nothing is lost that was not and it may be called again. No other thread may
 * be in a call. */
KVQ_API KVQ_CHECK int kvq_reattach(kvq_client *client, uint32_t *lost);

/* ---- Queues -------------------------------------------------------------------------------- */

typedef struct kvq_queue kvq_queue;

/* One ring pair, for one thread at a time. Release with kvq_queue_close. */
KVQ_API KVQ_CHECK int kvq_queue_open(kvq_client *client, kvq_queue **queue);
/* After calls .._on_stream it first waits until the GPU has done what this process gave it. */
KVQ_API void kvq_queue_close(kvq_queue **queue);

/* How long kvq_step_begin, kvq_step and kvq_fork of this queue wait where memory is short and no
 * idle session can make room: 0, the default: not at all, they are refused with KVQ_E_NO_MEMORY or
 * KVQ_E_QUOTA. Else until somebody frees some; after that, or at their own deadline if sooner, they
 * end with KVQ_E_DEADLINE. They hold nothing meanwhile; what could never fit is refused at once.
 * Have no step open in another queue then: its memory may be just what is missing. */
KVQ_API int kvq_queue_wait_for_room(kvq_queue *queue, uint64_t timeout_ns);

/* ---- Buffers: memory that tensors travel in -------------------------------------------------- */

typedef struct kvq_buffer kvq_buffer;

/* Shared memory made by the daemon, zeroed, mapped read-write here. bytes > 0. */
KVQ_API KVQ_CHECK int kvq_buffer_create(kvq_client *client, size_t bytes, kvq_buffer **buffer);

/* Registers the engine's own memfd (it keeps its descriptor and its mapping). offset is a
 * multiple of the page size. The memfd must be sealed against shrinking (F_SEAL_SHRINK; added
 * here if sealing is allowed) and writable; else KVQ_E_BUFFER. kvq_buffer_data is NULL. */
KVQ_API KVQ_CHECK int kvq_buffer_import_memfd(kvq_client *client, int memfd, uint64_t offset,
                                              size_t bytes, kvq_buffer **buffer);

KVQ_API void *kvq_buffer_data(const kvq_buffer *buffer);
KVQ_API size_t kvq_buffer_size(const kvq_buffer *buffer);

/* In the memory of a GPU, made by the daemon, zeroed, mapped read-write here: at the address of
 * kvq_buffer_device. The calling thread's current CUDA context must be of that GPU, which `gpu`
 * names as kvq_gpu_info.place does (NULL: the current context's). The buffer lives as long as this
 * process has it, also without the daemon. Destroy the context only after closing it.
 * KVQ_E_UNSUPPORTED (the daemon has no GPU, or not this one), KVQ_E_NO_MEMORY, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_buffer_create_on(kvq_client *client, const char *gpu, size_t bytes,
                                           kvq_buffer **buffer);

/* Registers the engine's own device memory: `bytes` from a device pointer of the calling thread's
 * current CUDA context, anywhere in an allocation. Nothing is copied. The memory must not be freed
 * before kvq_buffer_close has returned; if that was too much to promise, use kvq_buffer_create_on.
 * Any number of buffers may lie in one allocation. Memory by cudaMalloc can be imported (PyTorch's,
 * unless expandable_segments is on), and memory by cuMemCreate that may be exported as a file
 * descriptor; other memory is refused with KVQ_E_BUFFER or KVQ_E_UNSUPPORTED, and the text says why
 * and what to do. The daemon can then reach the whole allocation, not this piece alone. */
KVQ_API KVQ_CHECK int kvq_buffer_import(kvq_client *client, void *device_pointer, size_t bytes,
                                        kvq_buffer **buffer);

/* The device pointer of a buffer in a GPU's memory, else NULL. kvq_buffer_data is then NULL. */
KVQ_API void *kvq_buffer_device(const kvq_buffer *buffer);

/* Returns when nothing in flight uses it any more. */
KVQ_API void kvq_buffer_close(kvq_buffer **buffer);

enum { KVQ_DTYPE_F16 = 1, KVQ_DTYPE_BF16 = 2, KVQ_DTYPE_F32 = 3 };

/* A tensor [rows][heads][head_dim] in a buffer. Strides in bytes; head_dim is contiguous. */
struct kvq_tensor {
    const kvq_buffer *buffer; /* NULL: no tensor */
    uint64_t offset, token_stride, head_stride;
    uint8_t dtype;
};

/* A contiguous [rows][heads][dim] tensor at offset. */
KVQ_API struct kvq_tensor kvq_tensor_make(const kvq_buffer *buffer, uint64_t offset, uint32_t heads,
                                          uint32_t dim, uint8_t dtype);

/* ---- Sessions ------------------------------------------------------------------------------ */

/* A handle of this client; 0 is none. Becomes stale (KVQ_E_STALE) when closed or lost. */
typedef uint64_t kvq_session;

struct kvq_layer {
    uint16_t q_heads, kv_heads; /* q_heads is a multiple of kv_heads */
    uint16_t k_dim, v_dim;      /* 64, 128 or 256, and equal; else KVQ_E_SHAPE says what is held */
    uint32_t window;            /* sliding window in tokens, own token included; 0: none */
    float softcap;              /* 0: none */
    float scale;                /* softmax scale; 0: 1/sqrt(k_dim) */
    const char *format;         /* NULL: the session's */
    uint32_t kv_from;           /* 0: a cache of its own; else 1 + the layer whose cache it reads */
    uint32_t repeat;            /* this row stands for so many layers; 0: 1 */
};

/* Who rotates V by H / sqrt(v_dim), head by head. DEFAULT: as the format's paper does (DAEMON for
 * oscar* and quarot*, else NONE); an existing session's NONE or DAEMON is taken as it is. DAEMON:
 * when tokens are packed, and outputs back. ENGINE: V comes rotated, and outputs stay so. */
enum { KVQ_V_ROTATION_DEFAULT, KVQ_V_ROTATION_ENGINE, KVQ_V_ROTATION_DAEMON, KVQ_V_ROTATION_NONE };
enum { KVQ_ATTENTION_DEFAULT = 0, KVQ_ATTENTION_EXACT = 1, KVQ_ATTENTION_FAST = 2 };
enum {
    KVQ_ON_DETACH_DEFAULT = 0,
    KVQ_ON_DETACH_DROP = 1,
    KVQ_ON_DETACH_KEEP = 2,
    KVQ_ON_DETACH_SAVE = 3, /* keep, and save when nobody has it open; needs storage_dir */
};
enum {
    KVQ_OPEN_READ_ONLY = 1,
    KVQ_OPEN_TAKE_OVER = 2, /* end another writer's hold; its handle fails with KVQ_E_TAKEN */
    KVQ_OPEN_MUST_EXIST = 4,
    KVQ_OPEN_MUST_CREATE = 8,
    KVQ_OPEN_EXACT_PROMPT = 16, /* the default, but prompt_tokens must be said; see those */
    KVQ_OPEN_PACKED_PROMPT = 32 /* less memory; outputs of a prompt depend on its pieces */
};

/* Tokens that stand for an image or for audio: the same ids mean something else with another. */
struct kvq_span {
    uint64_t first;
    uint32_t tokens;
    uint8_t digest[32]; /* of what they stand for, e.g. its SHA-256 */
};

/* The beginning of a session's tokens: int32 ids in a buffer in the host's memory. */
struct kvq_prefix {
    const kvq_buffer *buffer;     /* NULL: none */
    uint64_t offset;              /* a multiple of 4 */
    uint64_t tokens;              /* ids from there on */
    const struct kvq_span *spans; /* among these and the tokens that follow; at most 1,024 */
    uint32_t n_spans;
};

/* Zero-initialize; only layers, n_layers and format are needed for a new unnamed session. */
struct kvq_session_options {
    const char *ns;    /* namespace; NULL: "uid-N" of this user */
    const char *name;  /* NULL: unnamed, private to this client, dropped with it */
    const char *model; /* fingerprint of weights, rope, ...; must match when opened again */
    const struct kvq_layer *layers; /* NULL with n_layers 0: open an existing one as it is */
    uint32_t n_layers;              /* rows; the sum of repeats is the number of layers */
    const char *format;             /* of docs/formats.md, or of the daemon's configuration */
    uint8_t dtype;                  /* of windows: KVQ_DTYPE_F16 (0 too) or KVQ_DTYPE_BF16 */
    uint8_t v_rotation;             /* KVQ_V_ROTATION */
    uint8_t attention; /* 0 leaves it to the daemon: fast, unless it is configured otherwise */
    uint8_t on_detach;
    uint16_t shard, shards;
    uint32_t flags, max_rollback;
    uint64_t prompt_tokens, keep_seconds; /* a prompt is read in 16 bits to its end if it fits */
    const char *place;   /* "host", a kvq_gpu_info.place; NULL: the daemon chooses, or as it is */
    const char *salt;    /* sessions share prefixes only where these two are equal; NULL: "". */
    const char *adapter; /* what changes the weights: a LoRA's name and version */
    struct kvq_prefix prefix; /* a session that is created begins with what is there of it */
};

struct kvq_session_info {
    uint64_t id, tokens, packed_bytes, window_bytes, table_bytes, full_precision_tokens;
    uint64_t saturated_values;
    double bits_per_value, bytes_per_token_head, bytes_per_token_head_total, compression;
    uint32_t layers;
    uint8_t created, read_only;
    char ns[128], name[128], format[64];
    char attention[16]; /* "exact" or "fast" on the host, "gpu" on a GPU */
    char isa[16];       /* whose kernels attend: "c", "avx2", "avx512"; "sm_90" */
    char place[48];     /* "host" or a kvq_gpu_info.place */
    uint32_t shard, shards;
    uint64_t group_tokens;  /* committed by all shards; 0 while one is missing */
    uint64_t prefix_tokens; /* that it began with: kvq_session_options.prefix */
    uint64_t exact_tokens;  /* of the prompt, read in 16 bits to its end; 0: packed as it comes */
    uint64_t shared_bytes;  /* of packed_bytes, others have them, too; of kvq_session_info alone */
    char tier[8];           /* where its memory is: "device", "host", or "disk": it has none */
    uint8_t pinned;         /* kvq_session_pin */
    char v_rotation[8];     /* "none", "engine", "daemon"; "mixed": by daemon in some layers */
};

/* Sharded sessions. A model that runs as several shards, by KV heads or by layers, has one session
 * with as many shards: each is opened by the same name with its own `shard` (and layers, and
 * place), usually by a process of its own, and all with the same `shards`, model, max_rollback,
 * prompt_tokens, v_rotation, dtype and on_detach, else KVQ_E_EXISTS. Each has a handle, a writer
 * and a token count of its own, and is worked with as if it was alone, but for this:
 *
 * - A step is one step of all shards. kvq_step_begin answers KVQ_E_NO_SESSION as long as a shard
 *   was never opened: let all ranks open theirs before the first step.
 * - kvq_step_end of a shard checks it and returns at once; entry.value is the token count that it
 *   will have. The tokens are committed, on all shards at once, when the last shard has ended its
 *   step. What is asked for through the handle that ended it waits until then (give a deadline if
 *   that may take for ever); readers see the committed tokens.
 *   A shard that has ended its step may be closed, and its client may even die.
 * - If a shard that has not ended the step leaves it (abort, close, take-over, death of its client,
 *   KVQ_E_NONFINITE, KVQ_E_INCOMPLETE) no shard has it, not those either that had ended it: all
 *   stand as before. The others' next call on that step, or behind its tokens, answers
 *   KVQ_E_CANCELLED, or KVQ_E_NO_STEP where the step has no other session; kvq_error_text names the
 *   shard.
 * - All shards begin the step at the same count and append as many tokens; else the last one's
 *   kvq_step_end answers KVQ_E_POSITION and no shard has it. kvq_truncate and kvq_accept act on
 *   one shard, so do the same on all of them; a step may be begun before all have.
 * - One queue can write several shards: in one request, or end all before any begins anew (else
 *   KVQ_E_BUSY). Forks are unnamed and therefore sessions of their own.
 * - Dropping one drops all; the time that a named session is kept counts from the last close of
 *   any. With n_layers 0 and shards 0 a shard is opened as it is.
 * - Saved, it can be opened with another number of shards: see docs/architecture.md. */

/* Opens or creates. KVQ_E_EXISTS (other shape, format or model), KVQ_E_BUSY (has a writer),
 * KVQ_E_PERMISSION, KVQ_E_FORMAT, KVQ_E_SHAPE, KVQ_E_LIMIT, KVQ_E_QUOTA. info may be NULL. */
KVQ_API KVQ_CHECK int kvq_session_open(kvq_client *client,
                                       const struct kvq_session_options *options,
                                       kvq_session *session, struct kvq_session_info *info);
/* Detaches: the session goes by its on_detach. */
KVQ_API int kvq_session_close(kvq_client *client, kvq_session session);
/* Destroys, with all shards. Readers' handles become stale. */
KVQ_API int kvq_session_drop(kvq_client *client, kvq_session session);
/* Moves the session (of several shards this one) to another place while it is open, and returns
 * when it is there: the same bytes, so that moving back gives the same bits. It begins when the
 * session's step and the requests on it have ended, for which it waits 10 s (then KVQ_E_BUSY);
 * from then on requests of all clients wait for it, and go on at the new place. There tensors must
 * lie where that place can reach them, and calls .._on_stream need a stream of its GPU. Blocks that
 * forks or a kept prefix share are copied, and stay where they were as well. Nothing has changed if
 * it fails: KVQ_E_INVALID (no such place), KVQ_E_NO_MEMORY and KVQ_E_QUOTA (no room there),
 * KVQ_E_BUSY (it is being moved, or read by a client in its own context), KVQ_E_READ_ONLY,
 * KVQ_E_STALE, KVQ_E_CANCELLED (it was dropped meanwhile). */
KVQ_API KVQ_CHECK int kvq_session_move(kvq_client *client, kvq_session session, const char *place);
/* Parks the session with all its shards: what is not saved of it is written to the daemon's
 * storage_dir, then its memory is freed, and the call returns. Handles, also those of others, stay
 * valid and say the same: whoever uses it next, or opens it, brings it back and only waits for
 * that. It need not have a name; what is stored of it then goes with it. KVQ_E_BUSY (it is in a
 * step or in use, pinned, read by a client in its own context, or was used meanwhile: it stays in
 * memory), KVQ_E_UNSUPPORTED (the daemon has no storage_dir), KVQ_E_INCOMPLETE (not all shards are
 * open), KVQ_E_NO_SPACE, KVQ_E_READ_ONLY, KVQ_E_STALE, KVQ_E_CANCELLED (it was dropped meanwhile).
 * Requests that bring it back may fail with KVQ_E_NO_MEMORY or KVQ_E_QUOTA: it then stays on disk,
 * and comes back once there is room. KVQ_E_DAMAGED, as of any handle of a session that was
 * restored: close it, and open the session again; one without a name is lost. */
KVQ_API KVQ_CHECK int kvq_session_park(kvq_client *client, kvq_session session);
/* Begins to bring a parked session back, and returns at once: by the time of the next step it may
 * be there. KVQ_E_BUSY (it is just being parked, or on its way already), KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_prefetch(kvq_client *client, kvq_session session);
/* With `pin`, the session stays in memory: it is never parked, and comes back if it is. Else it may
 * be. Of all shards. KVQ_E_READ_ONLY, KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_pin(kvq_client *client, kvq_session session, int pin);
/* Saves the session with all its shards, at what is committed, to the daemon's storage_dir, and
 * returns when that is durable: it then survives a kill -9 of the daemon and a loss of power. Only
 * blocks that are new since the last save are written; nothing if nothing has changed. Other
 * threads may go on with it meanwhile, in the middle of a step as well. Waits for as long as it
 * takes. KVQ_E_UNSUPPORTED (the daemon has no storage_dir), KVQ_E_INVALID (it has no name),
 * KVQ_E_INCOMPLETE (not all shards are open), KVQ_E_NO_SPACE, KVQ_E_BUSY (it was changed for 10 s
 * without a break), KVQ_E_STALE, KVQ_E_SYSTEM. */
KVQ_API KVQ_CHECK int kvq_session_save(kvq_client *client, kvq_session session);
/* Reads a saved session (of several shards that one) into the daemon's memory, and returns when all
 * of it is there, or was already. Not needed: opening a saved session restores it, and waits for
 * nothing; requests wait for the layers that they need. ns NULL: the user's own. shards: how many
 * it is to have, by KV heads (see "Sharded sessions"); 0: as it was saved. KVQ_E_NO_SESSION,
 * KVQ_E_EXISTS (not with so many shards), KVQ_E_DAMAGED, KVQ_E_NO_MEMORY, KVQ_E_QUOTA,
 * KVQ_E_UNSUPPORTED, KVQ_E_FORMAT, KVQ_E_VERSION (of another version), KVQ_E_PERMISSION. */
KVQ_API KVQ_CHECK int kvq_session_restore(kvq_client *client, const char *ns, const char *name,
                                          uint32_t shard, uint32_t shards);
KVQ_API KVQ_CHECK int kvq_session_info(kvq_client *client, kvq_session session,
                                       struct kvq_session_info *info);
/* The layers of an open session, also of one that was opened as it is: one row each, the first
 * `max` of them, with heads, dimensions and kv_from alone. *n: how many there are. */
KVQ_API KVQ_CHECK int kvq_session_layers(kvq_client *client, kvq_session session,
                                         struct kvq_layer *rows, uint32_t max, uint32_t *n);

/* ---- Prefixes: what sessions have in common --------------------------------------------------*/

/* Sessions that begin with the same tokens share the blocks of these, whichever client or engine
 * appended them, and after it has closed its session as well, for a while and as long as there is
 * room. The ids of tokens are told with the step that appends them (kvq_step_begin_ids,
 * kvq_step_work.ids, also of kvq_local_end), without a gap from the first token on. A session that
 * is created with kvq_session_options.prefix then has as many of these tokens as are there, as if
 * it had been forked there (info.tokens: its position); append the others.
 *
 * A daemon with storage_dir keeps the ids with the sessions that it saves, and finds what they
 * begin with on disk as well: requests wait until their layer is read. Where it cannot be read the
 * session begins with less; if it was open already, requests fail (KVQ_E_DAMAGED): open it anew.
 *
 * Shared are whole pages of 128 tokens that cannot change any more: behind max_rollback, and packed
 * in all layers. Nothing is shared that means something else: namespace (unless the configuration
 * says so), model, salt, adapter, layers, formats, dtype, v_rotation, attention and shard must be
 * equal, and the digests of images and audio among the tokens. `model` must be given. Layers with a
 * sliding window let a prefix end only where all is there that the window still sees. Sessions of
 * formats that keep sinks, outliers or factors of the prompt share by kvq_fork alone.
 *
 * Of a sharded session the shortest count of its shards is answered. Ranks that must begin alike
 * ask first, open with prefix.tokens set to that count, and look at info.tokens. */

/* How many tokens of options->prefix a session created with these options would begin with: 0 or a
 * multiple of 128. Holds nothing: it may be less a moment later. KVQ_E_UNSUPPORTED where sessions
 * of these options share by forks alone, KVQ_E_BUFFER, KVQ_E_BOUNDS, or as kvq_session_open. */
KVQ_API KVQ_CHECK int kvq_lookup(kvq_client *client, const struct kvq_session_options *options,
                                 uint64_t *tokens);

/* Says what tokens stand for that are yet to be appended. Each span takes the place of those that
 * it overlaps. KVQ_E_POSITION (they are there already), KVQ_E_INVALID, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_session_spans(kvq_client *client, kvq_session session,
                                        const struct kvq_span *spans, uint32_t n);

/* ---- Work ---------------------------------------------------------------------------------- */

/* One session's part in a request. Tensors are ragged: this session's tokens stand in rows
 * row, row + 1, ... of k and v, its queries in rows q_row, ... of q, out and lse. */
struct kvq_entry {
    kvq_session session;
    uint64_t position; /* the session's committed token count, else KVQ_E_POSITION */
    uint32_t row, q_row;
    uint32_t append;     /* tokens of this step (0: attend only) */
    uint16_t queries;    /* query tokens: the step's last; with append 0 behind all tokens */
    uint16_t list_token; /* paged: tokens to skip in the first page */
    /* Results. */
    int32_t status;
    uint64_t value; /* token count afterwards; fork: the new session; read: tokens read */
};

enum { KVQ_PAST_ONLY = 1 }; /* attend only to tokens before the step; merge the rest by LSE */

/* K and V in the engine's own paged cache: token t of an entry lies in page list[t / page_tokens]
 * at offset + page * page_stride + (t % page_tokens) * token_stride. `list` holds int32; an
 * entry's list starts at element `row`. */
struct kvq_pages {
    uint32_t page_tokens;
    uint64_t k_page_stride, v_page_stride;
    const kvq_buffer *list;
    uint64_t list_offset;
};

/* Ids of the tokens that a step appends, int32 in a buffer in the host's memory: an entry's start
 * at element `q_row`. */
struct kvq_ids {
    const kvq_buffer *buffer; /* NULL: none are told */
    uint64_t offset;          /* a multiple of 4 */
};

struct kvq_work {
    uint64_t step; /* from kvq_step_begin */
    uint32_t layer, flags;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    struct kvq_tensor k, v, q, out;
    struct kvq_tensor lse;  /* fp32 [rows][query heads]; optional */
    struct kvq_pages pages; /* page_tokens 0: not paged */
    struct kvq_ids ids;     /* of KVQ_DO_STEP_BEGIN or KVQ_DO_STEP_END */
};

/* Begins a step for n sessions (at most 1,024): checks positions, reserves memory for all layers,
 * so that no later call of the step fails for room. Entries that failed are not in the step.
 * *step is its number. KVQ_E_POSITION, KVQ_E_NO_MEMORY, KVQ_E_BUSY, KVQ_E_LIMIT, ... per entry. */
KVQ_API KVQ_CHECK int kvq_step_begin(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                     uint64_t *step);

/* The same, and says which tokens they are. */
KVQ_API KVQ_CHECK int kvq_step_begin_ids(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                         const struct kvq_ids *ids, uint64_t *step);

/* Hands over K and V of one layer for sessions of the step (all tokens of an entry at once;
 * fp32 is rounded to the window's dtype, saturating and counted; NaN and infinity fail that
 * session with KVQ_E_NONFINITE). */
KVQ_API KVQ_CHECK int kvq_append(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* Decode attention of one layer. Legal without a step (work->step 0) on committed tokens: then
 * entries have append 0. */
KVQ_API KVQ_CHECK int kvq_attend(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* Both in one request. What is written (out and lse here, k and v of kvq_read) overlaps neither
 * itself nor what the request reads, nor do the rows of two entries: else KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_append_attend(kvq_queue *queue, const struct kvq_work *work,
                                        struct kvq_entry *entries, uint32_t n);

/* Commits the step's sessions. One that lacks a layer, or was asked to append what it cannot (to a
 * layer without a cache of its own), fails with KVQ_E_INCOMPLETE and is out of the step,
 * as it was before: look at each entry's status. n 0 (entries may be NULL): all of the step's
 * sessions or, if one cannot be, none, with KVQ_E_INCOMPLETE; the step is then still open. On a GPU
 * it waits for the work, and a session whose values were not finite fails with KVQ_E_NONFINITE, is
 * out of the step; with n 0 that is the whole call's code, nothing is committed, and the step is
 * still open for the others, if there are any. */
KVQ_API KVQ_CHECK int kvq_step_end(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                   uint32_t n);
/* Leaves every session (n 0: all of the step) as it was before the step. */
KVQ_API KVQ_CHECK int kvq_step_abort(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                     uint32_t n);

/* Shortens each session to `tokens[i]` tokens, at most entry.position (else KVQ_E_INVALID for the
 * whole call). Within max_rollback the session is as if the rest had never been; deeper:
 * KVQ_E_ROLLBACK, nothing is changed, and entry.value is the shortest length it can be given.
 * Overwrites entry.list_token. The sessions must have no open step. */
KVQ_API KVQ_CHECK int kvq_truncate(kvq_queue *queue, struct kvq_entry *entries,
                                   const uint64_t *tokens, uint32_t n);

/* A new unnamed session of this client with the first entry.position tokens of each; shares
 * what is packed. entry.value is its handle, to be closed like any other. The source must have
 * no open step. KVQ_E_ROLLBACK if it cannot be forked there; entry.value says where it can. */
KVQ_API KVQ_CHECK int kvq_fork(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

/* Of the last entry.append tokens (at most max_rollback) keeps those at `list_token` indices,
 * ascending int32 at element `row` of the list, and moves them together: tree drafts. */
KVQ_API KVQ_CHECK int kvq_accept(kvq_queue *queue, const kvq_buffer *list, uint64_t list_offset,
                                 struct kvq_entry *entries, uint32_t n);

/* Tokens [position, position + append) of one layer, dequantized, in the engine's basis, into
 * work->k and work->v: token t at row `row` + t - position. Rows of tokens that the session does
 * not have (behind its end, or let go behind the layer's sliding window) are left untouched;
 * entry.value is the number of tokens written. */
KVQ_API KVQ_CHECK int kvq_read(kvq_queue *queue, const struct kvq_work *work,
                               struct kvq_entry *entries, uint32_t n);

/* A whole step in one request: K and V of all layers of its sessions, which all have so many
 * layers. The sessions are as after kvq_step_begin, kvq_append of each layer and kvq_step_end, or
 * as before: those codes per entry. Layers with kv_from have tensors without a buffer; all have the
 * same `pages` (page_tokens 0: not paged). */
struct kvq_step_work {
    const struct kvq_tensor *k, *v; /* n_layers each */
    uint32_t n_layers;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    struct kvq_pages pages;
    struct kvq_ids ids; /* with pages: the same buffer and offset as their list */
};
KVQ_API KVQ_CHECK int kvq_step(kvq_queue *queue, const struct kvq_step_work *work,
                               struct kvq_entry *entries, uint32_t n);

/* A request that does nothing, through the same validation: measures the ring. */
KVQ_API KVQ_CHECK int kvq_nop(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

/* ---- Without waiting: the same calls with a ticket ----------------------------------------- */

enum kvq_operation {
    KVQ_DO_NOP = 0,
    KVQ_DO_STEP_BEGIN = 1,
    KVQ_DO_APPEND = 2,
    KVQ_DO_ATTEND = 3,
    KVQ_DO_APPEND_ATTEND = 4,
    KVQ_DO_STEP_END = 5,
    KVQ_DO_STEP_ABORT = 6,
    KVQ_DO_TRUNCATE = 7, /* entry.list_token: tokens to drop */
    KVQ_DO_FORK = 8,
    KVQ_DO_ACCEPT = 9, /* the list in work->pages.list */
    KVQ_DO_READ = 10,
    KVQ_DO_STEP = 11 /* by kvq_step alone: kvq_submit refuses it */
};

typedef uint64_t kvq_ticket;

/* Submits; up to 8 tickets per queue may be open (else KVQ_E_CREDITS). Requests of one queue run
 * in the order submitted. `entries` must stay until the ticket is waited for; results go there.
 * For KVQ_DO_STEP_BEGIN the step's number is written to work->step at once. */
KVQ_API KVQ_CHECK int kvq_submit(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n, kvq_ticket *ticket);

/* Waits for a ticket. timeout_ns: 0 polls, UINT64_MAX waits as long as the daemon lives. Returns
 * the request's status and closes the ticket; KVQ_E_DEADLINE if it is not done yet (entries are
 * untouched, the ticket stays open); KVQ_E_DISCONNECTED if the daemon died and KVQ_E_CANCELLED
 * after kvq_reattach (the ticket is closed). A request's own deadline that passed is
 * KVQ_E_DEADLINE too, but in the status of its entries as well, and closes the ticket. */
KVQ_API KVQ_CHECK int kvq_wait(kvq_queue *queue, kvq_ticket ticket, uint64_t timeout_ns);

/* ---- On a stream: in the order of a GPU's work, without waiting ------------------------------ */

/* The same calls for sessions on a GPU, in the order of a stream of the engine (a CUstream or
 * cudaStream_t of the calling thread's current context; NULL is the default stream): the daemon's
 * GPU work begins when the stream has come here, and what is given to the stream afterwards begins
 * when that work has ended. The host waits for neither: tensors may still be being computed when
 * the call is made, and results are there for later work of the stream, not for the host.
 *
 * The calls return when the daemon has checked the request and enqueued its work: codes and
 * statuses are those of the checks. What only the GPU can find (KVQ_E_NONFINITE) is told by
 * kvq_step_end, which waits for the step's work. A request that is refused lets the stream go on,
 * its tensors untouched. If the daemon dies the stream goes on as well, and calls answer
 * KVQ_E_DISCONNECTED; what the stream computed since is not to be trusted.
 *
 * Tensors lie in buffers of the session's GPU, or in the host's where the daemon could make them
 * known to its GPU; they must stay until the stream has passed the call. All streams of one queue
 * are of one GPU and pass its calls in turn; those being captured are refused (KVQ_E_UNSUPPORTED).
 *
 * How the two streams wait for each other is found out at the first call: by words in memory where
 * both sides' GPUs can wait for those; else by events, where processes can share them (each call
 * then waits until the daemon has enqueued its work, but not for that work; and CUDA does not say
 * what becomes of the stream if the daemon dies); else the host waits (the stream is synchronized
 * before the request, and the call returns when its work is done): slower, but the same results.
 * KVQ_GPU_ORDER=words, =events or =host in the environment chooses by force. The GPU is reached
 * through libcuda.so.1, or what KVQ_GPU_DRIVER names. */
enum { KVQ_ORDER_NONE = 0, KVQ_ORDER_WORDS = 1, KVQ_ORDER_EVENTS = 2, KVQ_ORDER_HOST = 3 };

/* How this queue's calls order streams; KVQ_ORDER_NONE before the first. */
KVQ_API int kvq_queue_order(const kvq_queue *queue);

/* Does now, for the current context's GPU, what the first call would do: some system and driver
 * calls. For engines that capture graphs later, or measure. */
KVQ_API KVQ_CHECK int kvq_queue_prepare_streams(kvq_queue *queue);

KVQ_API KVQ_CHECK int kvq_append_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                           struct kvq_entry *entries, uint32_t n, void *stream);
KVQ_API KVQ_CHECK int kvq_attend_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                           struct kvq_entry *entries, uint32_t n, void *stream);
KVQ_API KVQ_CHECK int kvq_append_attend_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                                  struct kvq_entry *entries, uint32_t n,
                                                  void *stream);
KVQ_API KVQ_CHECK int kvq_read_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                         struct kvq_entry *entries, uint32_t n, void *stream);

/* These four with a ticket: with words it does not even wait for the checks. Other operations are
 * refused with KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_submit_on_stream(kvq_queue *queue, enum kvq_operation op,
                                           struct kvq_work *work, struct kvq_entry *entries,
                                           uint32_t n, void *stream, kvq_ticket *ticket);

/* ---- In the engine's own context: attention without a hop ----------------------------------- */

/* The library maps the blocks of the engine's sessions read-only and runs the daemon's own kernels:
 * on the host in the engine's threads, on a GPU in the engine's stream. K and V of the step are
 * read where they lie. Once per step one request hands them to the daemon, which stores and packs
 * them and publishes the next page table. Outputs are those of kvq_append_attend to the bit.
 *
 *     kvq_local_begin(local, entries, n)            no request: checks positions
 *     kvq_local_attend(local, &work, entries, n)    each layer: no request
 *     kvq_local_end(local, NULL, entries, n)        one request for all layers
 *
 * Where this cannot be (the daemon has another version of the blocks' layout or of page tables, the
 * CPU lacks its instruction set, ..) the same calls go through the daemon, with the same results,
 * and kvq_local_why says why. KVQ_LOCAL=daemon in the environment asks for that. Policy stays with
 * the daemon: while a session is in a kvq_local its blocks stay as the last step left them for this
 * engine, whoever drops or truncates it.
 *
 * Unlike a step of the daemon's, this one takes memory at its end: with KVQ_E_NO_MEMORY or
 * KVQ_E_QUOTA there nothing of that session's step is kept, and the engine may end it again. And K
 * and V that are not finite (KVQ_E_NONFINITE) are found there, when attention has read them.
 *
 * If the daemon dies, what is mapped stays: kvq_local_attend goes on for the step under way, and
 * its end answers KVQ_E_DISCONNECTED. After kvq_reattach all calls answer KVQ_E_CANCELLED: close
 * the kvq_local and open another. */
typedef struct kvq_local kvq_local;

/* Fail with KVQ_E_UNSUPPORTED where it would go through the daemon. */
enum { KVQ_LOCAL_REQUIRE = 1 };

struct kvq_local_options {
    const char *place;   /* of its sessions: "host" (NULL too) or a kvq_gpu_info.place */
    uint64_t max_tokens; /* of a session, a step's included: so long are page tables; 0: 131,072 */
    uint32_t flags;
    /* The host: how many threads may be used at a time, the caller's included; 0: 1. `parallel`
     * calls item(arg, i) once for every i below n, in any order and on any threads, and returns
     * when all have returned. NULL: the library starts threads of its own, until the close. */
    uint32_t threads;
    void (*parallel)(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);
    void *parallel_context;
};

/* Belongs to the queue's thread. options may be NULL. Close it before the queue. */
KVQ_API KVQ_CHECK int kvq_local_open(kvq_queue *queue, const struct kvq_local_options *options,
                                     kvq_local **local);
KVQ_API void kvq_local_close(kvq_local **local);

/* NULL if attention runs here, else a sentence that says why it goes through the daemon. */
KVQ_API const char *kvq_local_why(const kvq_local *local);

/* Takes an open session in: maps what is not mapped yet. System calls; not for every step.
 * KVQ_E_LIMIT: it is longer than max_tokens. KVQ_E_EXISTS: another kvq_local of this client has it.
 * Closing the session takes it out. */
KVQ_API KVQ_CHECK int kvq_local_add(kvq_local *local, kvq_session session);
KVQ_API int kvq_local_remove(kvq_local *local, kvq_session session);

/* Begins a step of sessions that were added (append 0: of reading alone). A session that something
 * else has changed since (truncated, appended to by requests of its own) is looked at anew first,
 * with a request. Statuses per entry, as of kvq_step_begin. One step at a time. */
KVQ_API KVQ_CHECK int kvq_local_begin(kvq_local *local, struct kvq_entry *entries, uint32_t n);

/* As kvq_append_attend, or kvq_attend for entries with append 0; work->step is not looked at. k and
 * v must stay as they are until kvq_local_end; without a buffer they are those that were given
 * before, for this layer or the one whose cache it reads. KVQ_E_INVALID for paged K and V. */
KVQ_API KVQ_CHECK int kvq_local_attend(kvq_local *local, const struct kvq_work *work,
                                       struct kvq_entry *entries, uint32_t n);

/* Commits the step: hands over K and V of all layers as they were given to kvq_local_attend, or as
 * `work` says; with its k and v NULL it says what tokens they are (work->ids) and no more. Statuses
 * per entry, as of kvq_step. Entries that are left out are as before. */
KVQ_API KVQ_CHECK int kvq_local_end(kvq_local *local, const struct kvq_step_work *work,
                                    struct kvq_entry *entries, uint32_t n);

/* Ends the step, and leaves every session as it was before. */
KVQ_API void kvq_local_abort(kvq_local *local);

/* On a GPU the three calls have a stream (as in kvq_attend_on_stream, and in its order) and a
 * bucket: device memory for the attentions of a step of up to so many sessions and tokens. A bucket
 * serves one stream at a time. Its attentions may be captured into a graph:
 * kvq_local_attend_on_stream on a stream that is being captured only notes the tensors and
 * launches; kvq_local_begin_on_stream before each replay, outside of the graph, sets the bucket up
 * for the entries it is given, which may be others each time, up to the bucket's limits, and of any
 * lengths. Rows may differ; tensors are those of the capture. kvq_local_end_on_stream comes after
 * the replay, outside of it. Tensors may lie in buffers of the host: the first call that has one
 * pins it; if that call is captured it is refused (KVQ_E_UNSUPPORTED).
 * The next step's work begins, in the order of the stream, when the daemon has published. The host
 * may be one step ahead. */
typedef struct kvq_bucket kvq_bucket;

struct kvq_bucket_options {
    kvq_session session;   /* any of those that it is for: their layers are alike */
    uint64_t max_tokens;   /* of a session, the step's included; 0: the kvq_local's */
    uint32_t max_sessions; /* in a step; 0: 1 */
    uint32_t max_queries;  /* of a session in a step; 0: 1 */
};

KVQ_API KVQ_CHECK int kvq_bucket_open(kvq_local *local, const struct kvq_bucket_options *options,
                                      kvq_bucket **bucket);
/* When its stream has passed its last work. Before its kvq_local is closed. */
KVQ_API void kvq_bucket_close(kvq_bucket **bucket);

KVQ_API KVQ_CHECK int kvq_local_begin_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                struct kvq_entry *entries, uint32_t n,
                                                void *stream);
KVQ_API KVQ_CHECK int kvq_local_attend_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                 const struct kvq_work *work,
                                                 struct kvq_entry *entries, uint32_t n,
                                                 void *stream);
/* What only the GPU can find (KVQ_E_NONFINITE) is told by the session's next
 * kvq_local_end_on_stream or kvq_step (by KVQ_ORDER_HOST at once): that session is then as it was
 * before the step that had such values. */
KVQ_API KVQ_CHECK int kvq_local_end_on_stream(kvq_local *local, const struct kvq_step_work *work,
                                              struct kvq_entry *entries, uint32_t n, void *stream);

/* ---- Capturing: K, V and Q into a file ------------------------------------------------------- */

/* Writes what an engine appends to a file, for tools that make codebooks and measure formats. The
 * file's layout is in the project's proto/capture.h. Needs no connection of its own; a capture
 * belongs to one thread at a time. */
typedef struct kvq_capture kvq_capture;

struct kvq_capture_options {
    const struct kvq_layer *layers; /* as for kvq_session_open */
    uint32_t n_layers;
    const char *model;   /* for people and tools; may be NULL */
    uint64_t max_tokens; /* of all sessions together, the rest is passed over; 0: no limit */
    uint8_t queries;     /* 1: Q as well */
};

/* Makes the file, or empties it. KVQ_E_SYSTEM, KVQ_E_SHAPE, KVQ_E_LIMIT, KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_capture_open(const char *path, const struct kvq_capture_options *options,
                                       kvq_capture **capture);

/* To be called with the same work and entries as kvq_append or kvq_append_attend, after it and
 * before the tensors change. Entries with a status other than 0 are passed over. With queries each
 * entry must have as many query tokens as tokens. After a failure (KVQ_E_SYSTEM, when the disk is
 * full) the file holds what was written before, and every further call fails alike. */
KVQ_API KVQ_CHECK int kvq_capture_append(kvq_capture *capture, const struct kvq_work *work,
                                         const struct kvq_entry *entries, uint32_t n);

/* Tokens begun so far, as one layer counts them. */
KVQ_API uint64_t kvq_capture_tokens(const kvq_capture *capture);

/* Writes the counts and closes the file. Accepts NULL and pointers to NULL. */
KVQ_API int kvq_capture_close(kvq_capture **capture);

/* ---- Merging ------------------------------------------------------------------------------- */

/* Merges two attentions over disjoint keys by their LSE: rows x dim fp32, lse rows. Outputs may
 * alias either input. A side with lse -inf counts for nothing. Pure function. */
KVQ_API void kvq_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                              const float *lse_b, float *out, float *lse, size_t rows, size_t dim);

#ifdef __cplusplus
}
#endif

#endif
