// SPDX-License-Identifier: Apache-2.0
//
// Every bound of the protocol and the daemon, in one place; those of the kernels, which include
// nothing of ours, stand in kernels/kernels.h. The configuration may lower some, and raises none.
#ifndef KVQ_PROTO_LIMITS_H
#define KVQ_PROTO_LIMITS_H

enum {
    // Names and texts, in bytes, terminating NUL included.
    KVQ_NAME_BYTES = 128,        // session and namespace names
    KVQ_FINGERPRINT_BYTES = 256, // model fingerprint
    KVQ_TEXT_BYTES = 512,        // error text of a reply

    // Shapes.
    KVQ_MAX_CODEBOOKS = 64, // in a daemon's memory
    KVQ_MAX_LAYERS = 256,
    KVQ_MAX_HEADS = 256,
    KVQ_MAX_SHARDS = 64,
    KVQ_MAX_SESSION_TOKENS = 1 << 24,
    KVQ_MAX_STEP_TOKENS = 1 << 16, // appended to one session in one step
    KVQ_MAX_SPANS = 1024,          // of images and audio among a session's tokens
    KVQ_MAX_GPU_QUERIES = 512,     // query tokens of one session on a GPU in one call
    KVQ_MAX_ROLLBACK = 1024,
    KVQ_EXACT_PROMPT_SHARE = 2, // a prompt kept in 16 bits takes up to 1/2 of its place's memory

    // Rings.
    KVQ_MAX_BATCH = 1024, // sessions in one request
    KVQ_SLOT_BYTES = 64,
    KVQ_REQ_SLOTS = 1 << 13, // request ring: 512 KiB
    KVQ_CQ_SLOTS = 1 << 12,  // completion ring: 256 KiB
    KVQ_QUEUE_CREDITS = 8,   // requests in flight on one queue
    KVQ_QUEUE_EVENTS = 8,    // with KVQ_ORDER_EVENTS: events of each kind, used in turn

    // Per client.
    KVQ_MAX_CLIENTS = 1024,
    KVQ_MAX_QUEUES = 64,   // per client
    KVQ_MAX_BUFFERS = 256, // per client
    KVQ_MAX_OPEN = 4096,   // open session handles per client
    KVQ_MAX_STEPS = 64,    // open steps per client
    KVQ_MAX_BUFFER_BYTES_LOG2 = 40,

    // Configuration.
    KVQ_MAX_NAMESPACES = 128,
    KVQ_MAX_OVERRIDES = 1024,   // namespaces whose limits were set at run time
    KVQ_MAX_OWN_FORMATS = 32,   // [format NAME] sections
    KVQ_MAX_FORMAT_RANGES = 32, // ranges of layers in one of them
    KVQ_MAX_PACK_ERRORS = 1024, // formats x layers whose error of packing is kept
    KVQ_MAX_SHARE_WITH = 32,    // names that a namespace shares its prefixes with
    KVQ_MAX_NAMESPACE_IDS = 64, // uids of one namespace, and gids
    KVQ_MAX_KEYS = 64,          // [key NAME] sections
    KVQ_MAX_GROUPS = 256,       // groups of a user; in more, only the primary one counts
    KVQ_MAX_WORKERS = 256,
    KVQ_MAX_PORTS = 4096,      // queues of all clients together
    KVQ_MAX_GPUS = 16,         // of one daemon
    KVQ_MAX_LETTING_GO = 1024, // closed host buffers and imports that GPUs have yet to let go of
    KVQ_GPU_CONNECTIONS = 32,  // most hardware queues that CUDA gives a process on a GPU
    KVQ_MAX_GPU_PENDING = 64,  // pieces of one client's work that are enqueued on one GPU
    KVQ_MAX_GPU_OPS = 512,     // operations enqueued on one stream and not started: a
                               // hardware queue blocks the caller from about 1,000 on
    KVQ_MAX_GPU_BURST = 900,   // the same for one session's work on an idle stream
    // Bytes of the runtime directory's path: socket paths hold 107, and the longest name below the
    // directory is "/admin/c99999".
    KVQ_MAX_RUNTIME_DIR = 80,
    KVQ_MAX_CONFIG = 256 * 1024, // bytes of a configuration file
    KVQ_MAX_CONFIG_FILES = 64,   // in conf.d
    KVQ_CONFIG_NAME = 64,        // bytes of their names, NUL included

    // Control messages and attach packets.
    KVQ_MAX_MESSAGE = 64 * 1024,
    // Elements of all repeated fields in one message: a session's spans and layers, and some more.
    KVQ_MAX_LIST = KVQ_MAX_SPANS + KVQ_MAX_LAYERS + 256,
    KVQ_WIRE_ARENA = 3072 * 1024, // memory that is enough to unpack any message
    KVQ_MAX_FIELD_BYTES = 64,     // of a field that is neither text nor message
    KVQ_MAX_PACKET_FDS = 8,
    KVQ_MAX_UNREAD_FDS = 16,      // in replies that a client has not read
    KVQ_ATTACH_TIMEOUT_MS = 5000, // the daemon closes a connection without Hello by then

    // Capture files.
    KVQ_MAX_CAPTURE_DIM = 1024,          // head_dim
    KVQ_MAX_CAPTURE_SEQUENCES = 1 << 16, // runs of sessions in one file
    KVQ_MAX_CAPTURE_SESSIONS = 4096,     // captured at the same time
    KVQ_MAX_CAPTURE_CHUNKS = 1 << 24,

    // Codebook files.
    KVQ_MAX_CODEBOOK_BYTES = 1 << 30,

    // Stores.
    KVQ_MAX_STORE_META = 1 << 20,     // opaque bytes of a session
    KVQ_MAX_STORE_BLOCK_LOG2 = 30,    // bytes of a block
    KVQ_MAX_STORE_SESSIONS = 1 << 10, // in one save
    KVQ_MAX_STORE_FOLDER = 1 << 10,   // bytes of a folder's path
};

// The largest limit of a namespace.
#define KVQ_MAX_QUOTA_BYTES  (1ull << 50)
#define KVQ_MAX_MOVE_WAIT_MS 3600000ull // how long a move may wait for steps and requests
#define KVQ_MAX_BUFFER_BYTES (1ull << KVQ_MAX_BUFFER_BYTES_LOG2)

#endif
