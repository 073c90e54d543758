// SPDX-License-Identifier: Apache-2.0
//
// Control messages: what is packed comes back, and hostile bytes are refused with a text that
// names the field, without memory beyond the arena.
#include "proto/status.h"
#include "proto/wire.h"
#include "tests/kits/unit.h"

static uint8_t memory[KVQ_WIRE_ARENA];
static struct kvq_arena arena;
static char text[KVQ_TEXT_BYTES];
static Kvq__Request *request; // unpacked last

static int setup(void **state)
{
    kvq_arena_init(&arena, memory, sizeof memory);
    memset(text, 0, sizeof text);
    return 0;
}

// Bytes written by hand, tag by tag.
struct bytes {
    uint8_t data[KVQ_MAX_MESSAGE + 16];
    size_t n;
};

static void put_varint(struct bytes *b, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        b->data[b->n++] = (uint8_t)(value | 0x80);
    b->data[b->n++] = (uint8_t)value;
}

static void put_number(struct bytes *b, unsigned field, uint64_t value)
{
    put_varint(b, field << 3);
    put_varint(b, value);
}

static void put_block(struct bytes *b, unsigned field, const void *data, size_t n)
{
    put_varint(b, field << 3 | 2);
    put_varint(b, n);
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static int unpack(const struct bytes *b, Kvq__Request **request)
{
    // Exactly as long as the message, so that a sanitizer sees any step beyond it.
    uint8_t *copy = malloc(b->n ? b->n : 1);
    memcpy(copy, b->data, b->n);
    int error = kvq_request_unpack(copy, b->n, &arena, request, text);
    free(copy);
    return error;
}

// They are, and begin anew.
static void refused(struct bytes *b, int code, const char *words)
{
    assert_int_equal(unpack(b, &request), code);
    assert_null(request);
    assert_says(text, words);
    b->n = 0;
}

// A request that opens a session whose name is the given bytes.
static void session_named(struct bytes *b, const void *name, size_t n)
{
    struct bytes inner = {.n = 0};
    put_block(&inner, 2, name, n);
    b->n = 0;
    put_block(b, 16, inner.data, inner.n);
}

TEST_BETWEEN(test_what_is_packed_comes_back, setup, NULL)
{
    uint8_t out[1024];
    size_t n;
    Kvq__Layer layer = KVQ__LAYER__INIT, *layers[] = {&layer};
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__Request request = KVQ__REQUEST__INIT, *back;
    layer.q_heads = 32;
    layer.softcap = 30.5f;
    open.name = (char *)"gr\xc3\xbc\xc3\x9f";
    open.layers = layers;
    open.n_layers = 1;
    open.prompt_tokens = 1ull << 40;
    request.id = 7;
    request.command_case = KVQ__REQUEST__COMMAND_OPEN_SESSION;
    request.open_session = &open;
    assert_int_equal(kvq_request_pack(&request, out, sizeof out, &n), 0);
    assert_int_equal(kvq_request_unpack(out, n, &arena, &back, text), 0);
    assert_int_equal(back->id, 7);
    assert_string_equal(back->open_session->name, open.name);
    assert_int_equal(back->open_session->n_layers, 1);
    assert_int_equal(back->open_session->layers[0]->q_heads, 32);
    assert_true(back->open_session->layers[0]->softcap == 30.5f);
    assert_true(back->open_session->prompt_tokens == 1ull << 40);
    assert_int_equal(kvq_request_pack(&request, out, n - 1, &n), KVQ_E_LIMIT);
}

// Whoever sent what does not pass the checks can be told, if its fields can be told apart.
TEST_BETWEEN(test_id_of_what_is_refused, setup, NULL)
{
    (void)state;
    struct bytes b = {.n = 0}, name = {.n = 0};
    put_block(&name, 2, "a\nb", 3);
    put_block(&b, 19, name.data, name.n);
    put_number(&b, 1, 4711);
    assert_int_equal(unpack(&b, &request), KVQ_E_PROTOCOL);
    assert_int_equal(kvq_request_check(b.data, b.n, text), KVQ_E_PROTOCOL);
    assert_int_equal(kvq_request_id(b.data, b.n), 4711);
    for (size_t n = 0; n < b.n; n++) // cut anywhere: it is not there, or its front is another one
        assert_int_equal(kvq_request_id(b.data, n), 0);
    put_number(&b, 1, 4712); // which of the two?
    assert_int_equal(kvq_request_id(b.data, b.n), 0);
    b.n = 0;
    put_number(&b, 1, 1ull << 32);
    assert_int_equal(kvq_request_id(b.data, b.n), 0);
    b.n = 0;
    put_block(&b, 1, "\x07", 1); // of another wire type
    assert_int_equal(kvq_request_id(b.data, b.n), 0);
    assert_int_equal(kvq_request_id(NULL, 0), 0);
    put_number(&b, 2, 1);
    put_number(&b, 30, 1);
    assert_int_equal(kvq_request_id(b.data, b.n), 0);
}

TEST_BETWEEN(test_texts, setup, NULL)
{
    static const struct {
        const char *bytes;
        size_t n;
    } bad[] = {
        {"a\0b", 3},             // NUL inside
        {"a\nb", 3},             // control character
        {"\x7f", 1},             // DEL
        {"\xc2\x85", 2},         // NEL, a control character beyond ASCII
        {"\xe2\x80\xa8", 3},     // line separator
        {"\xc0\xaf", 2},         // overlong
        {"\xe0\x80\xaf", 3},     // overlong
        {"\xe0\x82\xaf", 3},     // overlong
        {"\xf0\x8f\xbf\xbf", 4}, // overlong
        {"\xed\xa0\x80", 3},     // surrogate
        {"\xf4\x90\x80\x80", 4}, // beyond Unicode
        {"\xf8\x88\x80\x80\x80", 5},
        {"\xe2\x82", 2}, // cut short
        {"\x80", 1},     // continuation alone
    };
    struct bytes b;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        session_named(&b, bad[i].bytes, bad[i].n);
        refused(&b, KVQ_E_PROTOCOL, "OpenSession.name");
    }
    char longest[KVQ_TEXT_BYTES];
    memset(longest, 'x', sizeof longest);
    session_named(&b, longest, KVQ_TEXT_BYTES - 1);
    assert_int_equal(unpack(&b, &request), 0);
    session_named(&b, longest, KVQ_TEXT_BYTES);
    refused(&b, KVQ_E_PROTOCOL, "512 bytes long; at most 511");
    static const char *const good[] = {"\xf0\x9f\x8d\xa3", "\xef\xbf\xbd", "\xf4\x8f\xbf\xbf"};
    for (int i = 0; i < 3; i++) {
        session_named(&b, good[i], strlen(good[i]));
        assert_int_equal(unpack(&b, &request), 0);
    }
}

// Fields of plain bytes: UUIDs and handles.
TEST_BETWEEN(test_bytes, setup, NULL)
{
    struct bytes b = {.n = 0}, import = {.n = 0}, gpu = {.n = 0};
    uint8_t handle[KVQ_MAX_FIELD_BYTES + 1];
    for (size_t i = 0; i < sizeof handle; i++)
        handle[i] = (uint8_t)(i * 37);
    for (size_t n = 0; n <= sizeof handle; n++) {
        gpu.n = import.n = b.n = 0;
        put_block(&gpu, 2, handle, n);
        put_block(&import, 3, gpu.data, gpu.n);
        put_block(&b, 14, import.data, import.n);
        if (n > KVQ_MAX_FIELD_BYTES) {
            refused(&b, KVQ_E_PROTOCOL, "GpuMemory.handle is 65 bytes long; at most 64");
            continue;
        }
        assert_int_equal(unpack(&b, &request), 0);
        assert_int_equal(request->import_buffer->gpu->handle.len, n);
        assert_memory_equal(request->import_buffer->gpu->handle.data, handle, n);
    }
    put_number(&gpu, 1, 5); // a UUID is no number
    import.n = b.n = 0;
    put_block(&import, 3, gpu.data, gpu.n);
    put_block(&b, 14, import.data, import.n);
    refused(&b, KVQ_E_PROTOCOL, "GpuMemory.");
}

TEST_BETWEEN(test_broken_structure, setup, NULL)
{
    struct bytes b = {.n = 0};
    refused(&b, KVQ_E_PROTOCOL, "no command");
    put_number(&b, 1, 5);
    refused(&b, KVQ_E_PROTOCOL, "no command");
    put_block(&b, 30, "", 0);
    put_block(&b, 31, "", 0);
    refused(&b, KVQ_E_PROTOCOL, "status besides another");
    put_block(&b, 30, "", 0);
    put_number(&b, 1, 1);
    put_number(&b, 1, 2);
    refused(&b, KVQ_E_PROTOCOL, "Request.id appears twice");
    put_number(&b, 30, 1); // ping is a message
    refused(&b, KVQ_E_PROTOCOL, "Request.ping has wire type 0");
    put_varint(&b, 30 << 3 | 3); // a group
    refused(&b, KVQ_E_PROTOCOL, "wire type 3");
    put_varint(&b, 16 << 3 | 2);
    put_varint(&b, 1000); // longer than what follows
    refused(&b, KVQ_E_PROTOCOL, "cut short");
    put_varint(&b, 16 << 3 | 2);
    put_varint(&b, UINT64_MAX);
    refused(&b, KVQ_E_PROTOCOL, "cut short");
    put_varint(&b, 0); // field number 0
    refused(&b, KVQ_E_PROTOCOL, "broken field number");
    memset(b.data, 0xff, 11); // a number that never ends
    b.n = 11;
    refused(&b, KVQ_E_PROTOCOL, "broken field number");
    b.n = KVQ_MAX_MESSAGE + 1;
    refused(&b, KVQ_E_LIMIT, "65537 bytes");
}

TEST_BETWEEN(test_too_many_elements, setup, NULL)
{
    struct bytes inner = {.n = 0}, b = {.n = 0};
    for (int i = 0; i < KVQ_MAX_LIST; i++)
        put_block(&inner, 6, "", 0);
    put_block(&b, 16, inner.data, inner.n);
    assert_int_equal(unpack(&b, &request), 0);
    assert_int_equal(request->open_session->n_layers, KVQ_MAX_LIST);
    put_block(&inner, 6, "", 0);
    b.n = 0;
    put_block(&b, 16, inner.data, inner.n);
    refused(&b, KVQ_E_PROTOCOL, "more than 1536");
    put_block(&b, 30, "", 0);
    for (int i = 0; i <= KVQ_MAX_LIST; i++)
        put_number(&b, 1000, 0); // unknown fields cost memory as well
    refused(&b, KVQ_E_PROTOCOL, "unknown fields");
    inner.n = 0; // counted over all depths together
    for (int i = 0; i < KVQ_MAX_LIST / 2; i++)
        put_block(&inner, 6, "", 0);
    put_block(&b, 16, inner.data, inner.n);
    for (int i = 0; i <= KVQ_MAX_LIST / 2; i++)
        put_number(&b, 1000, 0);
    refused(&b, KVQ_E_PROTOCOL, "unknown fields");
}

// A list's elements with as many fields as fit: no other message needs as much memory.
TEST_BETWEEN(test_the_largest_fits_the_arena, setup, NULL)
{
    enum { FIELDS = 18 };
    const ProtobufCMessageDescriptor *d = &kvq__session__descriptor;
    struct bytes session = {.n = 0}, list = {.n = 0}, b = {.n = 0};
    Kvq__Reply *reply;
    for (unsigned i = 0, n = 0; i < d->n_fields && n < FIELDS; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        if (f->label == PROTOBUF_C_LABEL_REPEATED || f->type == PROTOBUF_C_TYPE_FLOAT ||
            f->type == PROTOBUF_C_TYPE_DOUBLE)
            continue;
        if (f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_MESSAGE)
            put_block(&session, f->id, "", 0);
        else
            put_number(&session, f->id, 1);
        n++;
    }
    assert_in_range(session.n, 2 * FIELDS, 3 * FIELDS);
    for (int i = 0; i < KVQ_MAX_LIST && list.n + session.n + 16 < KVQ_MAX_MESSAGE; i++)
        put_block(&list, 1, session.data, session.n);
    put_block(&b, 32, list.data, list.n);
    assert_int_equal(kvq_reply_unpack(b.data, b.n, &arena, &reply, text), 0);
    assert_true(arena.used > KVQ_WIRE_ARENA / 2);
}

TEST_BETWEEN(test_unknown_fields_are_ignored, setup, NULL)
{
    struct bytes b = {.n = 0};
    put_block(&b, 30, "", 0);
    put_number(&b, 900, 12345);
    put_block(&b, 901, "anything\0at all", 15);
    assert_int_equal(unpack(&b, &request), 0);
    assert_int_equal(request->command_case, KVQ__REQUEST__COMMAND_PING);
}

TEST_BETWEEN(test_arena, setup, NULL)
{
    struct bytes b;
    session_named(&b, "name", 4);
    size_t before = arena.used;
    assert_int_equal(unpack(&b, &request), 0);
    assert_true(arena.used > before);
    assert_true((uint8_t *)request >= memory && (uint8_t *)request < memory + sizeof memory);
    for (size_t size = 0; size < 400; size += 7) {
        kvq_arena_init(&arena, memory, size);
        int error = unpack(&b, &request);
        assert_true(error == 0 || error == KVQ_E_LIMIT);
        assert_true(arena.used <= size);
    }
    kvq_arena_init(&arena, memory, 100);
    assert_string_equal(kvq_arena_text(&arena, "a\nb\xff\xc3\xa4"), "a?b?\xc3\xa4");
    assert_null(kvq_arena_alloc(&arena, SIZE_MAX));
    assert_null(kvq_arena_alloc(&arena, 101));
    assert_true(arena.full);
}

TEST_BETWEEN(test_random_bytes, setup, NULL)
{
    struct bytes b;
    uint32_t seed = 20260101;
    for (int round = 0; round < 20000; round++) {
        session_named(&b, "a name", 6);
        put_number(&b, 1, 77);
        for (int flips = 0; flips < 1 + round % 5; flips++) {
            seed = seed * 1664525 + 1013904223;
            b.data[(seed >> 8) % b.n] ^= (uint8_t)(1u << (seed >> 29));
        }
        kvq_arena_init(&arena, memory, sizeof memory);
        int error = unpack(&b, &request);
        assert_true(error == 0 ? request != NULL : request == NULL && text[0]);
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
