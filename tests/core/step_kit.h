// SPDX-License-Identifier: Apache-2.0
//
// What the tests of whole steps on a GPU share: sessions of three layers, steps of theirs in the
// order of a client's stream or the host's, and page tables, which must say what the session says.
#ifndef KVQ_TESTS_STEP_KIT_H
#define KVQ_TESTS_STEP_KIT_H

#include "tests/kits/stream_kit.h"

enum {
    PAGES = 16,
    OUTLIERS = 300, // tokens from which ott2 has packed some
    EXTRAS = MIB,
};

// A session of three layers: ott2 keeps outliers from its third one on.
void open_layers(struct streamer *s, const char *name, const char *format);
uint32_t layers_of(struct streamer *s);
uint64_t tokens_of(struct streamer *s);
// What the session keeps besides the blocks of its third layer, as the GPU has it.
void extras_of(struct streamer *s, uint8_t bytes[EXTRAS]);

// A page table of a session, in memory that the GPU reaches.
struct table {
    struct streamer *s;
    struct kvq_table_page *page;
    uint8_t *copy; // on the host
};

struct table open_table(struct streamer *s);
void close_table(struct table *t);      // nothing writes it any more then
void free_table(const struct table *t); // of a client that is gone
// Says of all pages what the session's own view at its count says.
void check_page(const struct table *t);
// And so does its copy on the host.
void check_table(const struct table *t);

// A STEP of all layers, whose tensors lie in the client's buffer.
struct kvq_request step_header(struct streamer *s, uint16_t entries);
// Asks for one of n tokens: 1 if it waits, else the entry's or the request's code.
int request(struct streamer *s, uint64_t position, uint32_t n, bool on_stream);
// At the session's count, in the order of the stream, which has yet to signal; without a timeline
// in the host's.
int step(struct streamer *s, uint32_t n);
// The stream signals, and all that was asked for in its order ends.
void go_on(struct streamer *s);
// Both, for a step that succeeds.
void whole_step(struct streamer *s, uint32_t n);

#endif
