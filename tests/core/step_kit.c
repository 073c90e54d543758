// SPDX-License-Identifier: Apache-2.0
//
// Steps of all layers on a GPU, and the page tables of their sessions; see step_kit.h.
#include "tests/core/step_kit.h"

#include "daemon/core/session/table.h"
#include "tests/kits/unit.h"

static char text[KVQ_TEXT_BYTES]; // why the last call was refused

// A session of three layers: ott2 keeps outliers from its third one on.
void open_layers(struct streamer *s, const char *name, const char *format)
{
    struct kvq__layer_row row = stream_row;
    struct kvq__session_spec spec = {.name = name,
                                     .format = format,
                                     .place = kvq__pool_name(&kit.core->pools[1]),
                                     .layers = &row,
                                     .n_layers = 1};
    row.repeat = 3;
    s->session = kit_opened(&s->m, &spec);
}

uint32_t layers_of(struct streamer *s)
{
    return kit_of(&s->m, s->session)->n_layers;
}

struct table open_table(struct streamer *s)
{
    uint32_t layers = layers_of(s);
    struct table t = {s, sim_gpus()->memory_new(kvq_table_bytes(layers, PAGES)),
                      calloc(1, kvq_table_bytes(layers, PAGES))};
    memset(t.page, 0, kvq_table_bytes(layers, PAGES));
    struct kvq__table_memory memory = {.on = kit.core->pools[1].gpu,
                                       .gpu = (uintptr_t)t.page,
                                       .copy = t.copy,
                                       .layers = layers,
                                       .pages = PAGES};
    assert_int_equal(kvq__table_open(s->m.client, s->session, 1ull << 40, &memory, text), 0);
    return t;
}

static struct kvq_table_layer head_of(const struct table *t, uint32_t layer)
{
    struct kvq_table_layer head;
    memcpy(&head, (const uint8_t *)(t->page + 1) + layer * kvq_table_layer_bytes(PAGES),
           sizeof head);
    return head;
}

static struct kvq_table_entry entry_of(const struct table *t, uint32_t layer, uint32_t page)
{
    const uint8_t *at = (const uint8_t *)(t->page + 1) + layer * kvq_table_layer_bytes(PAGES) +
                        sizeof(struct kvq_table_layer);
    struct kvq_table_entry entries[PAGES];
    memcpy(entries, at, sizeof entries);
    return entries[page];
}

// Says of all pages what the session's own view at its count says.
void check_page(const struct table *t)
{
    struct kvq__session *s = kit_of(&t->s->m, t->s->session);
    struct kvq_page pages[PAGES];
    assert_int_equal(t->page->tokens, s->tokens);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        uint32_t n = kvq__pages_view(s, l, s->tokens, s->tokens, pages);
        struct kvq_table_layer head = head_of(t, l);
        assert_int_equal(head.n_pages, n);
        assert_int_equal(!head.extras, !kvq__extras_view(s, &s->layers[l], s->tokens));
        for (uint32_t i = 0; i < n; i++) {
            struct kvq_table_entry e = entry_of(t, l, i);
            assert_int_equal(e.tokens, pages[i].tokens);
            assert_int_equal(e.packed_tokens, pages[i].packed_tokens);
            assert_int_equal(e.packed % (2 * MIB), (uintptr_t)pages[i].packed % (2 * MIB));
            assert_true(e.packed_tokens == e.tokens || e.raw);
        }
    }
}

// And so does its copy on the host.
void check_table(const struct table *t)
{
    check_page(t);
    assert_memory_equal(t->copy, t->page, kvq_table_bytes(layers_of(t->s), PAGES));
}

uint64_t tokens_of(struct streamer *s)
{
    return kit_of(&s->m, s->session)->tokens;
}

// Of a STEP of all layers, whose tensors lie in the client's buffer.
struct kvq_request step_header(struct streamer *s, uint16_t entries)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP, entries);
    r.layer = layers_of(s);
    r.slots = (uint16_t)kvq_request_slots(r.count, r.layer);
    for (uint32_t i = 0; i < r.layer; i++)
        s->m.layers[i] = (struct kvq_step_layer){kit_view(&s->m, 0, HEADS, DIM, KVQ_F32),
                                                 kit_view(&s->m, BUFFER / 2, HEADS, DIM, KVQ_F32)};
    return r;
}

int request(struct streamer *s, uint64_t position, uint32_t n, bool on_stream)
{
    struct kvq_entry_wire e = {.handle = s->session, .position = position, .append = n};
    struct kvq_request r = step_header(s, 1);
    r.flags = on_stream ? KVQ_REQ_ON_STREAM : 0;
    r.signal = on_stream ? ++s->signal : 0;
    return kit_ask(&s->m, &r, &e);
}

// In the order of the stream, which has yet to signal; without a timeline in the host's.
int step(struct streamer *s, uint32_t n)
{
    return request(s, tokens_of(s), n, s->alone);
}

void go_on(struct streamer *s)
{
    stream_ready(s);
    stream_settle(s);
}

void whole_step(struct streamer *s, uint32_t n)
{
    assert_int_equal(step(s, n), 0);
    go_on(s);
}

// What a session keeps besides its blocks, as the GPU has it.
void extras_of(struct streamer *s, uint8_t bytes[EXTRAS])
{
    const struct kvq__layer *l = &kit_of(&s->m, s->session)->layers[2];
    size_t n = kvq_extras_bytes(l->format, &l->shape);
    assert_in_range(n, 1, EXTRAS);
    memset(bytes, 0, EXTRAS);
    assert_int_equal(kvq__gpu_take(kit.core->pools[1].gpu, bytes, (uintptr_t)l->extras.data, n), 0);
}

void free_table(const struct table *t)
{
    sim_gpus()->memory_free(t->page);
    free(t->copy);
}

void close_table(struct table *t)
{
    uint64_t gone = kit.tables_gone;
    assert_int_equal(kvq__table_close(t->s->m.client, t->s->session, NULL), 0);
    stream_settle(t->s);
    assert_int_equal(kit.tables_gone, gone + 1);
    free_table(t);
}
