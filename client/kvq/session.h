/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/session.h: sessions, the KV caches that the daemon owns. For everybody.
 *
 * residency.h moves, parks, saves and restores them; shards.h is for models that run as several
 * shards; prefix.h for sessions that begin with the same tokens.
 */
#ifndef KVQ_PUBLIC_SESSION_H
#define KVQ_PUBLIC_SESSION_H

#include "buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A handle of this client; 0 is none. A handle becomes stale (KVQ_E_STALE) when it is closed, and
 * when the session or the connection is lost. */
typedef uint64_t kvq_session;

/* One layer of the model, or several that are alike. Zero-initialize: the heads and dimensions are
 * enough for a layer with a cache of its own, full attention and the session's format. */
struct kvq_layer {
    uint16_t q_heads, kv_heads; /* q_heads is a multiple of kv_heads */
    uint16_t k_dim, v_dim;      /* 1 to 256, and equal, else KVQ_E_SHAPE; stored as 64, 128 or 256.
                                 * A GPU takes 64, 128 and 256 alone */
    uint32_t window;            /* sliding window in tokens, own token included; 0: none */
    float softcap;              /* 0: none */
    float scale;                /* softmax scale; 0: 1/sqrt(k_dim) */
    const char *format;         /* NULL: the session's */
    uint32_t kv_from;           /* 0: a cache of its own; else 1 + the layer whose cache it reads */
    uint32_t repeat;            /* this row stands for so many layers; 0: 1 */
};

/* Who rotates V by H / sqrt(d), head by head; d is v_dim as it is stored. DEFAULT: as in the
 * format's paper (DAEMON for oscar* and quarot*, else NONE), or as an existing session was opened
 * (NONE or DAEMON). DAEMON: the daemon rotates V when it packs tokens, and rotates outputs back.
 * ENGINE: the engine appends rotated V and gets rotated outputs; with a v_dim of 64, 128 or 256. */
enum { KVQ_V_ROTATION_DEFAULT, KVQ_V_ROTATION_ENGINE, KVQ_V_ROTATION_DAEMON, KVQ_V_ROTATION_NONE };

/* The path of attention on the host (formats.md in share/doc/kvqd). DEFAULT: as the daemon is
 * configured, FAST unless the configuration says otherwise. */
enum { KVQ_ATTENTION_DEFAULT = 0, KVQ_ATTENTION_EXACT = 1, KVQ_ATTENTION_FAST = 2 };

/* What the daemon does with a session when the last client has closed it. DEFAULT: drops a session
 * without a name, and keeps a named one for keep_seconds. What was saved of a session (by
 * kvq_session_save, or by a daemon that ended while the session was open) stays on disk with DROP,
 * too; kvq_session_drop deletes it. */
enum {
    KVQ_ON_DETACH_DEFAULT = 0,
    KVQ_ON_DETACH_DROP = 1,
    KVQ_ON_DETACH_KEEP = 2, /* as DEFAULT, but refused (KVQ_E_INVALID) without a name */
    KVQ_ON_DETACH_SAVE = 3, /* keep, and save once no client has the session open; needs
                             * storage_dir */
};

/* Flags of an open. */
enum {
    KVQ_OPEN_READ_ONLY = 1,
    KVQ_OPEN_TAKE_OVER = 2, /* take the session from its writer. A step that the writer has open
                             * is undone: its next calls for the session fail with
                             * KVQ_E_NO_STEP. Then its handle fails with KVQ_E_TAKEN */
    KVQ_OPEN_MUST_EXIST = 4,
    KVQ_OPEN_MUST_CREATE = 8,
    KVQ_OPEN_EXACT_PROMPT = 16, /* refuse an open without prompt_tokens */
    KVQ_OPEN_PACKED_PROMPT = 32 /* less memory; outputs of a prompt depend on its pieces */
};

/* Tokens that stand for an image or for audio, whose ids alone do not say which. */
struct kvq_span {
    uint64_t first;
    uint32_t tokens;
    uint8_t digest[32]; /* of the image or audio, e.g. its SHA-256 */
};

/* The first tokens of a session: int32 ids in a buffer on the host. */
struct kvq_prefix {
    const kvq_buffer *buffer;     /* NULL: none */
    uint64_t offset;              /* a multiple of 4 */
    uint64_t tokens;              /* ids from `offset` on */
    const struct kvq_span *spans; /* in these tokens and those that follow; at most 1,024 */
    uint32_t n_spans;
};

/* Zero-initialize: only size, layers, n_layers and format are needed for a new session without a
 * name. Texts are UTF-8 and copied; "" is as NULL. ns, name, salt and adapter take up to 127 bytes,
 * model up to 255, format up to 63. A session that exists, in memory or saved, keeps the on_detach,
 * keep_seconds, max_rollback, prompt_tokens and attention of the open that created it. */
struct kvq_session_options {
    uint32_t size;     /* sizeof(struct kvq_session_options) */
    const char *ns;    /* namespace; NULL: "uid-N" of this user */
    const char *name;  /* NULL: a session of this client alone, dropped with the client */
    const char *model; /* fingerprint of weights, rope, ..; compared if given, as are salt and
                        * adapter, when a session is opened again: always give it with a name */
    const struct kvq_layer *layers; /* NULL with n_layers 0: open an existing session as it is */
    uint32_t n_layers;              /* rows; the sum of repeats is the number of layers */
    const char *format;             /* of formats.md in share/doc/kvqd, or of the configuration */
    uint8_t dtype;                  /* of windows: KVQ_DTYPE_F16 or KVQ_DTYPE_BF16; 0: BF16 if the
                                     * first layer has format bf16, else F16 */
    uint8_t v_rotation;             /* KVQ_V_ROTATION */
    uint8_t attention;              /* KVQ_ATTENTION */
    uint8_t on_detach;              /* KVQ_ON_DETACH */
    uint16_t shard, shards;         /* this one, from 0, of so many (0: 1); see shards.h. Without a
                                     * name no shard waits for the others */
    uint32_t flags;                 /* KVQ_OPEN */
    uint32_t max_rollback;          /* tokens that kvq_truncate and kvq_accept may take back, at
                                     * most 1,024 */
    uint64_t prompt_tokens;         /* of the prompt, which attention reads in 16 bits up to its
                                     * end if that fits; 0: not known, it is packed as it comes */
    uint64_t keep_seconds;          /* after the last close, of a session with a name that is not
                                     * to be dropped; 0: the configured time */
    const char *place;   /* "host", a kvq_gpu_info.place; NULL: as it is, or the daemon's choice, a
                          * GPU if it has one and the layers' dims are 64, 128 or 256 */
    const char *salt;    /* sessions share prefixes only if salt and adapter are equal; NULL: "" */
    const char *adapter; /* of the weights, e.g. a LoRA's name and version */
    struct kvq_prefix prefix; /* a new session begins with the blocks that exist of it */
};

/* A session's properties and figures. Bytes and bits are of memory, not of disk. */
struct kvq_session_info {
    uint32_t size; /* sizeof(struct kvq_session_info): set before the call */
    uint32_t layers;
    uint64_t id;                         /* of this daemon's run */
    uint64_t tokens;                     /* committed: the position of the next step */
    uint64_t packed_bytes, window_bytes; /* packed blocks, with sinks; tokens still in 16 bits */
    uint64_t table_bytes;                /* of page tables */
    uint64_t full_precision_tokens;      /* tokens of one layer still in the window */
    uint64_t saturated_values;           /* clamped to the 16-bit range when appended */
    double bits_per_value;               /* of packed blocks, with their parameters */
    double bytes_per_token_head;         /* of packed blocks: K and V of one KV head */
    double bytes_per_token_head_total;   /* of all memory */
    double compression;                  /* bytes of a 16-bit cache of these tokens / memory; 0
                                          * if nothing is in memory */
    uint8_t created;                     /* 1: this open created the session */
    uint8_t read_only;                   /* 1: this handle only reads */
    char ns[128], name[128], format[64];
    char attention[16]; /* "exact" or "fast" on the host, "gpu" on a GPU */
    char isa[16];       /* of the kernels: "amx", "avx512", .. or "sm_90" */
    char place[48];     /* "host" or a kvq_gpu_info.place */
    uint32_t shard, shards;
    uint64_t group_tokens;  /* committed by all shards; 0 while one is missing */
    uint64_t prefix_tokens; /* shared at creation: kvq_session_options.prefix */
    uint64_t exact_tokens;  /* of the prompt, if attention reads the prompt in 16 bits; else 0 */
    uint64_t shared_bytes;  /* part of packed_bytes, in blocks that others have as well; only
                             * kvq_session_info counts it; 0 if there are over 65,536 blocks */
    char tier[8];           /* "device", "host", or "disk" (parked) */
    uint8_t pinned;         /* 1: by kvq_session_pin */
    char v_rotation[8];     /* "none", "engine", "daemon"; "mixed": daemon in some layers */
    uint32_t max_rollback;  /* as of kvq_session_options */
};

/* Opens a session, or creates it. info may be NULL. Release the handle with kvq_session_close.
 * KVQ_E_EXISTS (the session has another shape, format or model, or was not to exist),
 * KVQ_E_NO_SESSION (it was to exist, and does not), KVQ_E_BUSY (another client writes it),
 * KVQ_E_PERMISSION, KVQ_E_FORMAT, KVQ_E_SHAPE, KVQ_E_INVALID, KVQ_E_LIMIT, KVQ_E_NO_MEMORY,
 * KVQ_E_QUOTA, KVQ_E_DRAINING, KVQ_E_NO_NAMESPACE, KVQ_E_UNSUPPORTED (the text says what is
 * missing: a storage_dir for KVQ_ON_DETACH_SAVE, a model for a prefix, a GPU). */
KVQ_API KVQ_CHECK int kvq_session_open(kvq_client *client,
                                       const struct kvq_session_options *options,
                                       kvq_session *session, struct kvq_session_info *info);

/* Closes the handle; on_detach decides what the daemon does with the session. */
KVQ_API int kvq_session_close(kvq_client *client, kvq_session session);

/* Destroys the session with all its shards. Handles of other clients become stale. */
KVQ_API int kvq_session_drop(kvq_client *client, kvq_session session);

/* Asks the daemon for the session's properties and figures. KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_info(kvq_client *client, kvq_session session,
                                       struct kvq_session_info *info);

/* Fills the first `max` rows with the layers of an open session, one row each, and *n with their
 * number. All fields but format (NULL) are as they were given to the open; of a session that was
 * opened as it is they are as the daemon has them (scale is then never 0; daemons before 0.2 do not
 * tell window, softcap and scale, which are 0). repeat is 1. Sends no request. KVQ_E_STALE,
 * KVQ_E_UNSUPPORTED (the daemon did not say what the layers are). */
KVQ_API KVQ_CHECK int kvq_session_layers(kvq_client *client, kvq_session session,
                                         struct kvq_layer *rows, uint32_t max, uint32_t *n);

#ifdef __cplusplus
}
#endif

#endif
