// SPDX-License-Identifier: Apache-2.0
//
// Pushing and removing sessions where others do so at the same time, or something was left undone,
// against a server whose answers are written out here.
#include "tests/store/remote_check.h"

// ---- Chunks ----

// Of a file of any size a chunk is no longer than what a pull reads.
static void chunks_can_be_read(void **state)
{
    (void)state;
    enum { ROOM = 513 << 20 };
    static const uint64_t sizes[] = {1ull << 30, 256ull << 30, 1ull << 40, 8ull << 40};
    uint8_t *zeros = calloc(1, ROOM); // a sum over zeros ends no chunk
    assert_non_null(zeros);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct kvq__index index = {.bytes = 0}, again;
        const char *why = "";
        char *head = NULL;
        size_t n = 0;
        uint64_t fresh = 0, about = kvq__chunk_about(sizes[i], 16 << 20);
        size_t chunk = kvq__chunk_end(zeros, ROOM, about);
        assert_int_equal(chunk, kvq__chunk_most(about));
        assert_true(sizes[i] / (about / 4 < chunk ? about / 4 : chunk) <= KVQ__INDEX_CHUNKS);
        assert_int_equal(kvq__index_add(&index, zeros, chunk), 0);
        assert_int_equal(kvq__index_place(&index, NULL, &fresh), 0);
        memset(index.packs[0].digest, 'a', KVQ__SHA_HEX - 1);
        assert_int_equal(kvq__index_write(&index, &head, &n), 0);
        if (kvq__index_read(head, n, &again, &why) != 0)
            fail_msg("a chunk of %zu bytes: %s", chunk, why);
        kvq__index_free(&again);
        kvq__index_free(&index);
        free(head);
    }
    free(zeros);
}

// ---- Removing ----

// A removal that failed behind the head goes on with the data, whose list may be longer than one
// look, and says that there is no session only where there is nothing.
static void a_removal_is_finished(void **state)
{
    (void)state;
    static const struct script_reply replies[] = {
        {.bytes = OK "Content-Length: 9\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = "HTTP/1.1 403 No\r\n\r\n"},
        {.bytes = ABSENT},
        {.bytes = LIST(KEY("s/n/data/1", "5") KEY("s/n/data/2", "5"))},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = LIST(KEY("s/n/data/3", "5"))},
        {.bytes = PART_DONE},
        {.bytes = LIST("")},
        {.bytes = NO_UPLOADS},
        {.bytes = ABSENT},
        {.bytes = LIST("")},
        {.bytes = NO_UPLOADS},
    };
    begin(replies, sizeof replies / sizeof *replies);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_PERMISSION);
    if (kvq_remote_forget(remote, "s", "n", text, sizeof text) != 0)
        fail_msg("%s", text);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_NO_SESSION);
    says("there is no such session");
    end();
    assert_int_equal(server.n_asked, sizeof replies / sizeof *replies);
    assert_non_null(strstr(server.asked[1], "DELETE /sessions/s/n/head"));
    assert_non_null(strstr(server.asked[6], "DELETE /sessions/s/n/data/2"));
    assert_non_null(strstr(server.asked[8], "DELETE /sessions/s/n/data/3"));
}

// A store that lists what it was told to delete again and again is left in the end.
static void a_removal_has_an_end(void **state)
{
    (void)state;
    static const struct script_reply again[] = {
        {.bytes = OK "Content-Length: 9\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = LIST(KEY("s/n/data/1", "5"))},
    };
    begin(again, 3);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_REMOTE);
    says("after 100 deletions the store still lists objects there");
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_can_be_read),
        cmocka_unit_test(a_removal_is_finished),
        cmocka_unit_test(a_removal_has_an_end),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
