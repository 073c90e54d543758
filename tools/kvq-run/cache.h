// SPDX-License-Identifier: Apache-2.0
//
// The engine's KV cache and attention: all of it in kvqd, through libkvq.
// With in_context attention runs in this process, over the daemon's memory.
//
// An engine is one connection, one queue and one shared buffer in which q, k, v and the attention
// output of a step travel. A cache is one session. Not thread-safe.
#ifndef KVQ_RUN_CACHE_H
#define KVQ_RUN_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/kvq.h"
#include "tools/kvq-run/config.h"
#include "tools/kvq-run/problem.h"

enum { CACHE_STEP_TOKENS = 512 }; // query tokens of one call, as kvqd takes them

struct engine {
    kvq_client *client;
    kvq_queue *queue;
    kvq_local *local; // NULL: the daemon attends
    kvq_buffer *buffer;
    struct kvq_tensor tq, tk, tv, tout;
    float *q, *k, *v, *out; // [tokens][heads][head_dim] in the buffer
    int32_t *ids;           // of the step's tokens, likewise
    uint64_t ids_offset;
    uint32_t step_tokens; // rows of each
    uint64_t layer_bytes; // of one layer's k and v, if each has its own
    struct kvq_daemon_info daemon;
};

// A file that K, V and Q of one or more caches go to, and what it needs of the command line.
struct capture_options {
    const char *path, *model;
    uint64_t tokens;
};

struct cache_options {
    const char *format, *session, *ns, *model;
    uint8_t attention;
    uint8_t v_rotation; // KVQ_V_ROTATION
    bool may_unfold;    // a session that is there with V as it comes is taken, too
    uint64_t prompt_tokens;
    bool keep;
    const uint32_t *prompt; // begin with what is there of it, and tell ids; NULL: neither
    uint64_t prompt_ids;
    kvq_capture *capture; // NULL: not captured
};

struct cache {
    struct engine *engine;
    kvq_session session;
    uint64_t tokens; // committed
    uint64_t prefix; // that a new session began with
    bool tells_ids;
    bool rotated; // V must come rotated: model_fold
    uint64_t step;
    uint32_t step_tokens;
    kvq_capture *capture; // not owned
};

// runtime_dir NULL: the usual place. Release with engine_close, also after a failure.
int engine_open(struct engine *e, const struct config *c, const char *runtime_dir, bool in_context,
                uint32_t step_tokens, struct problem *p);
// Where a layer's k and v go: they must stay until the step's end where attention is in_context.
void engine_layer(struct engine *e, uint32_t layer);
void engine_close(struct engine *e);

int cache_open(struct cache *k, struct engine *e, const struct config *c,
               const struct cache_options *o, struct problem *p);
void cache_close(struct cache *k);
// Makes what is committed of a named session outlive the daemon.
int cache_save(struct cache *k, struct problem *p);
// Closes it, and nothing of it stays anywhere.
int cache_drop(struct cache *k, struct problem *p);

// One step: begin, attend for every layer (q, k, v of the step lie in the engine's areas, the
// output comes to engine->out), end.
int cache_begin(struct cache *k, const uint32_t *ids, uint32_t tokens, struct problem *p);
int cache_attend(struct cache *k, uint32_t layer, struct problem *p);
int cache_end(struct cache *k, struct problem *p);
void cache_abort(struct cache *k); // leaves the session as it was before the step

// path NULL: none, *capture is NULL then. Released with capture_close, which writes the counts and
// can fail.
int capture_open(const struct capture_options *o, const struct config *c, kvq_capture **capture,
                 struct problem *p);
int capture_close(kvq_capture **capture, struct problem *p);

int cache_info(struct cache *k, struct kvq_session_info *info, struct problem *p);

#endif
