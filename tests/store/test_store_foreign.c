// SPDX-License-Identifier: Apache-2.0
//
// Files to import that somebody else has made: their checksums are right, and what they say is not.
// All of them are refused with a sentence, and nothing of them is visible.
#include "storage/manifest.h"
#include "tests/store/move_check.h"

// Replaces a record's payload of n bytes, and makes its checksums right.
static void forge_record(uint8_t *at, const void *payload, size_t n, uint64_t salt)
{
    struct kvq_record r;
    memcpy(&r, at, sizeof r);
    kvq_record_make(&r, (enum kvq_record_kind)r.kind, r.id, r.transaction, r.length,
                    kvq_checksum(payload, n), salt);
    memcpy(at, &r, sizeof r);
    memcpy(at + sizeof r, payload, n);
}

// A file whose records are all sound, but whose end counts others than there are: somebody has put
// it together from parts.
TEST(wrong_count)
{
    struct kvq_file_head head;
    struct kvq_record r;
    struct kvq_commit commit;
    make_group();
    take_over("group");
    struct fault_file *file = fault_find(&other_disk, file_path);
    uint8_t *end = file->data + file->bytes - kvq_record_bytes(sizeof commit);
    memcpy(&head, file->data + sizeof r, sizeof head);
    for (int field = 0; field < 2; field++)
        for (int by = -1; by <= 1; by++) {
            memcpy(&commit, end + sizeof r, sizeof commit);
            *(field ? &commit.records : &commit.sessions) += (uint64_t)by;
            uint8_t keep[sizeof r + sizeof commit];
            memcpy(keep, end, sizeof keep);
            forge_record(end, &commit, sizeof commit, head.salt);
            if (by) {
                refused(field ? "records" : "sessions", (uint64_t)by);
                assert_says(other.text, "its end counts other sessions and records");
            }
            memcpy(end, keep, sizeof keep);
        }
    assert_int_equal(import_it(false), 0);
}

// A shard by itself, which nobody could open.
TEST(a_shard_is_missing)
{
    w.sessions[0] =
        (struct world_session){.used = true, .name = "half", .shard = 1, .shards = 2, .n = 1};
    w.sessions[0].blocks[0] = (struct world_block){.seed = 1, .bytes = 500};
    assert_int_equal(kit_save(&k, &w, "half"), 0);
    take_over("half");
    refused("half of a session", 0);
    assert_says(other.text, "it holds 1 of 2 shards");
}

// Of blocks without bytes a file may have so many that noting them takes more memory than the file
// has bytes.
TEST(a_block_without_bytes)
{
    w.sessions[0] = (struct world_session){.used = true, .name = "one", .shards = 1, .n = 2};
    w.sessions[0].blocks[0] = (struct world_block){.seed = 1, .bytes = 500};
    w.sessions[0].blocks[1] = (struct world_block){.place = {.page = 1}, .seed = 2, .bytes = 0};
    assert_int_equal(kit_save(&k, &w, "one"), 0);
    take_over("one");
    refused("a block", 0);
    assert_says(other.text, "a block of 0 bytes");
}

static int look_at_it(struct kvq_store_file *file)
{
    int rc = kvq_store_look(other.store, file_path, NULL, file, other.text, sizeof other.text);
    free(file->opaque);
    return rc;
}

// One shard in the place of another: a file may say so, and no save can.
TEST(a_shard_twice)
{
    static uint8_t bytes[1 << 16];
    struct kvq_file_head head;
    struct kvq_store_file look;
    struct kvq_record r;
    uint32_t shard = 0;
    make_group();
    take_over("group");
    struct fault_file *file = fault_find(&other_disk, file_path);
    uint8_t *at = file->data + KVQ_SEGMENT_FRONT;
    memcpy(&head, file->data + sizeof r, sizeof head);
    memcpy(&r, at, sizeof r);
    at += kvq_record_bytes(r.length);
    memcpy(&r, at, sizeof r);
    assert_true(r.kind == KVQ_RECORD_MANIFEST && r.length <= sizeof bytes);
    memcpy(bytes, at + sizeof r, r.length);
    memcpy(bytes + offsetof(struct kvq_manifest_head, shard), &shard, sizeof shard);
    forge_record(at, bytes, r.length, head.salt);
    assert_int_equal(look_at_it(&look), KVQ_E_DAMAGED);
    refused("a shard", 0);
    assert_says(other.text, "it holds shard 0 twice");
}

// Two shards whose tokens no 64 bits can add up: whoever took them in could save nothing more.
TEST(too_many_tokens)
{
    static uint8_t bytes[1 << 16];
    static const uint64_t counts[] = {INT64_MAX, KVQ_MAX_SESSION_TOKENS + 1};
    struct kvq_file_head head;
    struct kvq_record r;
    make_group();
    take_over("group");
    struct fault_file *file = fault_find(&other_disk, file_path);
    memcpy(&head, file->data + sizeof r, sizeof head);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint8_t *at = file->data + KVQ_SEGMENT_FRONT;
        for (int shard = 0; shard < 2; shard++) {
            memcpy(&r, at, sizeof r);
            assert_int_equal(r.kind, KVQ_RECORD_MANIFEST);
            assert_true(r.length <= sizeof bytes);
            memcpy(bytes, at + sizeof r, r.length);
            memcpy(bytes + offsetof(struct kvq_manifest_head, tokens), &counts[i],
                   sizeof counts[i]);
            forge_record(at, bytes, r.length, head.salt);
            at += kvq_record_bytes(r.length);
        }
        refused("tokens", counts[i]);
        assert_says(other.text, "tokens; at most 16777216 are allowed");
    }
    struct world beside = {.random = 1};
    beside.sessions[0] = (struct world_session){.used = true, .name = "beside", .shards = 1};
    assert_int_equal(kit_save(&other, &beside, "beside"), 0);
    beside.sessions[0].tokens = KVQ_MAX_SESSION_TOKENS + 1;
    assert_int_equal(kit_save(&other, &beside, "beside"), KVQ_E_LIMIT);
}

// Names that no message may hold: the session could never be named again, not even to delete it.
TEST(names_without_sense)
{
    static uint8_t bytes[1 << 16];
    static const size_t fields[] = {
        offsetof(struct kvq_manifest_head, space), offsetof(struct kvq_manifest_head, name),
        offsetof(struct kvq_manifest_head, model), offsetof(struct kvq_manifest_head, formats)};
    static const char *const texts[] = {"\xff", "\xc3", "a\xc2\x85", "\xed\xa0\x80", "\n"};
    struct kvq_file_head head;
    struct kvq_record r;
    w.sessions[0] = (struct world_session){.used = true, .name = "one", .shards = 1};
    assert_int_equal(kit_save(&k, &w, "one"), 0);
    take_over("one");
    uint8_t *file = fault_find(&other_disk, file_path)->data, *at = file + KVQ_SEGMENT_FRONT;
    memcpy(&head, file + sizeof r, sizeof head);
    memcpy(&r, at, sizeof r);
    assert_true(r.kind == KVQ_RECORD_MANIFEST && r.length <= sizeof bytes);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (size_t j = 0; j < sizeof texts / sizeof *texts; j++) {
            uint8_t keep[sizeof r + sizeof bytes];
            memcpy(keep, at, sizeof r + r.length);
            memcpy(bytes, at + sizeof r, r.length);
            memcpy(bytes + fields[i], texts[j], strlen(texts[j]) + 1);
            forge_record(at, bytes, r.length, head.salt);
            refused("text", i * 10 + j);
            assert_says(other.text, "control characters or is not UTF-8");
            memcpy(at, keep, sizeof r + r.length);
        }
    struct world beside = {.random = 1};
    beside.sessions[0] = (struct world_session){.used = true, .name = "\xe4", .shards = 1};
    assert_int_equal(kit_save(&other, &beside, "\xe4"), KVQ_E_INVALID);
    snprintf(beside.sessions[0].name, sizeof beside.sessions[0].name, "\xc3\xa4");
    assert_int_equal(kit_save(&other, &beside, "\xc3\xa4"), 0);
}

// ---- Damage with much behind it ----

// What is read from the other disk.
static struct {
    int64_t (*read)(struct kvq_io *io, int file, void *data, size_t n, uint64_t at);
    uint64_t bytes;
    bool hole; // behind each file are zeros without end
} other_reads;

static int64_t read_counted(struct kvq_io *io, int file, void *data, size_t n, uint64_t at)
{
    int64_t got = other_reads.read(io, file, data, n, at);
    if (got == 0 && other_reads.hole) {
        memset(data, 0, n);
        got = (int64_t)n;
    }
    other_reads.bytes += got > 0 ? (uint64_t)got : 0;
    return got;
}

// Damage ends an import at once, however much of the file is behind it.
TEST(a_long_tail)
{
    enum { TAIL = 64 << 20, READ_MOST = 1 << 20 };
    make_group();
    take_over("group");
    struct fault_file *file = fault_find(&other_disk, file_path);
    const uint64_t bytes = file->bytes, spoiled[] = {bytes, KVQ_SEGMENT_FRONT};
    int handle = other_disk.io.open(&other_disk.io, file_path, KVQ_IO_WRITE);
    assert_true(handle >= 0);
    assert_int_equal(other_disk.io.truncate(&other_disk.io, handle, bytes + TAIL), 0);
    other_disk.io.close(&other_disk.io, handle);
    other_reads.read = other_disk.io.read;
    other_disk.io.read = read_counted;
    for (size_t i = 0; i < sizeof spoiled / sizeof *spoiled; i++) {
        file->data[spoiled[i]] ^= 1;
        other_reads.bytes = 0;
        refused("spoiled at", spoiled[i]);
        if (other_reads.bytes > READ_MOST)
            fail_msg("%" PRIu64 " bytes were read", other_reads.bytes);
        file->data[spoiled[i]] ^= 1;
    }
    other_disk.io.read = other_reads.read;
}

static int status_of_long_file(struct kvq_io *io, int file, struct kvq_io_status *status)
{
    (void)io, (void)file;
    *status = (struct kvq_io_status){.bytes = 4ull << 30};
    return 0;
}

// Nor is a record read that is longer than any may be. Its header may be right, and its payload a
// hole.
TEST(a_long_record)
{
    enum { READ_MOST = 1 << 20 };
    struct kvq_file_head head;
    struct kvq_record r;
    make_group();
    take_over("group");
    uint8_t *data = fault_find(&other_disk, file_path)->data;
    memcpy(&head, data + sizeof r, sizeof head);
    kvq_record_make(&r, KVQ_RECORD_BLOCK, 1, 1, 1ull << 30, (struct kvq_checksum){0}, head.salt);
    memcpy(data + KVQ_SEGMENT_FRONT, &r, sizeof r);
    int (*status)(struct kvq_io *, int, struct kvq_io_status *) = other_disk.io.status;
    other_reads.read = other_disk.io.read;
    other_reads.bytes = 0;
    other_disk.io.read = read_counted;
    other_disk.io.status = status_of_long_file;
    other_reads.hole = true;
    int rc = import_it(false);
    other_disk.io.read = other_reads.read;
    other_disk.io.status = status;
    other_reads.hole = false;
    assert_int_equal(rc, KVQ_E_LIMIT);
    assert_says(other.text, "a record of 1073741824 bytes; fewer than 2^30 are allowed");
    assert_in_range(other_reads.bytes, 1, READ_MOST);
}

int main(void)
{
    return run_all(NULL, NULL);
}
