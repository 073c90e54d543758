// SPDX-License-Identifier: Apache-2.0
//
// stream.h: the session of one stream of a llama.cpp cache, that is, of a sequence whose tokens lie
// in cells 0, 1, .. in their order.
//
// llama.cpp decides where it goes on; the session is brought there. Behind its end: refused. A few
// tokens back (KVQ_LLAMA_ROLLBACK): truncated. Further: a new session shares the packed pages that
// stay, and gets the rest as kvqd reads them back. At cell 0: another sequence, a new session.
// Behind cells that llama.cpp has restored, copied or shifted meanwhile, or that a connection had
// which is lost: refused.
#ifndef KVQ_GGML_STREAM_H
#define KVQ_GGML_STREAM_H

#include "client/ggml/cache.h"

#define KVQ_GGML_LOST UINT64_MAX // a stamp that no cell has

struct kvq_ggml_stream {
    kvq_session session; // 0: none yet
    uint64_t tokens;     // committed
    uint64_t stamp;      // in llama.cpp's first cell since the last step; 0: no step was made here
    // The named session that was there before llama.cpp began was let go for another sequence,
    // whose session has no name.
    bool spared;
    // Of its tokens. llama.cpp tells backends no ids, so tokens get numbers here, by which pages of
    // 128 tokens are found again. NULL: not known, since the session was there before.
    int32_t *ids;
};

// What the streams of a cache share.
struct kvq_ggml_sessions {
    struct kvq_ggml_daemon *daemon;
    kvq_local *local; // NULL: none yet
    int threads;      // of local
    uint64_t cells;   // of a stream
    int32_t next_id;
    uint64_t last_stamp;
    char salt[24]; // pages of sessions without a name are shared within this cache alone
    uint32_t n_layers;
    const struct kvq_ggml_layer *layers;
};

// Of a cache with these layers, which must stay. Opens nothing yet.
void kvq_ggml_sessions_init(struct kvq_ggml_sessions *all, struct kvq_ggml_daemon *daemon,
                            const struct kvq_ggml_layer *layers, uint32_t n);

// Brings the stream to `cell` tokens, behind which a step of `rows` follows. False: refused, with a
// line on stderr; the stream is as it was, or begins anew at cell 0.
bool kvq_ggml_stream_go_to(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                           uint32_t which, uint64_t cell, uint32_t rows);

// Gives the tokens of the step numbers, and writes them to `to` as well.
void kvq_ggml_stream_number(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                            uint32_t rows, int32_t *to);

// The step is stored: the stream has so many tokens.
void kvq_ggml_stream_committed(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                               uint32_t which, uint64_t tokens);

// The session is gone with the connection: what goes on over it is refused until it begins anew.
void kvq_ggml_stream_forget(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream);

// Closes the session: one with a name stays in kvqd.
void kvq_ggml_stream_close(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream);

#endif
