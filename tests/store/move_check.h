// SPDX-License-Identifier: Apache-2.0
//
// What tests of exported files share: a store with sessions, an empty one on another disk, and a
// file on its way from the one to the other.
#ifndef KVQ_TESTS_MOVE_CHECK_H
#define KVQ_TESTS_MOVE_CHECK_H

#include "proto/status.h"
#include "tests/kits/unit.h"
#include "tests/store/store_kit.h"

// A store, what it is to hold, and an empty one on another disk.
static struct fault_io disk, other_disk;
static struct kit k, other;
static struct world w;
static const char *const file_path = "/exported.kvqs";

static int setup(void **state)
{
    fault_open(&disk, 1);
    fault_open(&other_disk, 2);
    k = other = (struct kit){.stays_open = true};
    w = (struct world){.random = 1};
    return kit_open(&k, &disk.io) || kit_open(&other, &other_disk.io);
}

static int teardown(void **state)
{
    kvq_store_close(&k.store);
    kvq_store_close(&other.store);
    fault_close(&disk);
    fault_close(&other_disk);
    return 0;
}

static inline int export_it(const char *name)
{
    return kvq_store_export(k.store, "uid-1", name, file_path, true, k.text, sizeof k.text);
}

static inline int import_it(bool replace)
{
    return kvq_store_import(other.store, file_path, NULL, NULL, replace, other.text,
                            sizeof other.text);
}

// A group of two shards whose first blocks are one, and a session beside it.
static inline void make_group(void)
{
    for (uint32_t shard = 0; shard < 2; shard++) {
        struct world_session *s = &w.sessions[shard];
        *s = (struct world_session){.used = true,
                                    .name = "group",
                                    .shard = shard,
                                    .shards = 2,
                                    .tokens = 700,
                                    .seed = 77 + shard,
                                    .pages = 3};
        for (uint32_t i = 0; i < 5; i++)
            s->blocks[s->n++] = (struct world_block){
                .place = {shard, i, 1, i * 128}, .seed = i + shard * 10, .bytes = 100 + i * 333};
    }
    assert_int_equal(kit_save(&k, &w, "group"), 0);
    w.sessions[1].blocks[0].id = w.sessions[0].blocks[0].id;
    w.sessions[1].blocks[0].seed = w.sessions[0].blocks[0].seed;
    w.sessions[1].blocks[0].bytes = w.sessions[0].blocks[0].bytes;
    assert_int_equal(kit_save(&k, &w, "group"), 0);
    struct world beside = {0};
    beside.sessions[0] = (struct world_session){.used = true, .name = "beside", .shards = 1};
    assert_int_equal(kit_save(&k, &beside, "beside"), 0);
}

// Copies a file from one disk to the other.
static inline void carry(struct fault_io *from, struct fault_io *to, uint64_t bytes)
{
    struct fault_file *file = fault_find(from, file_path);
    assert_non_null(file);
    int handle = to->io.open(&to->io, file_path, KVQ_IO_WRITE | KVQ_IO_CREATE);
    assert_true(handle >= 0);
    assert_int_equal(to->io.truncate(&to->io, handle, 0), 0);
    assert_int_equal(kvq_io_write(&to->io, handle, file->data, bytes, 0), 0);
    to->io.close(&to->io, handle);
}

// Exports the session, and takes the file to the other disk.
static inline void take_over(const char *name)
{
    assert_int_equal(export_it(name), 0);
    carry(&disk, &other_disk, fault_find(&disk, file_path)->bytes);
}

// Nothing of a spoiled file is visible, and the store goes on.
static inline void refused(const char *what, uint64_t at)
{
    struct kvq_store_status status;
    struct kvq_store_session of; // its first session alone may be good
    if (kvq_store_exported(other.store, file_path, &of, other.text, sizeof other.text) == 0 &&
        !of.name[0])
        fail_msg("%s %" PRIu64 ": a session without a name", what, at);
    other.text[0] = '\0';
    int rc = import_it(false);
    if (rc == 0 || !other.text[0])
        fail_msg("%s %" PRIu64 ": it was taken", what, at);
    assert_int_equal(kvq_store_status(other.store, &status, other.text, sizeof other.text), 0);
    assert_int_equal(status.sessions, 0);
    assert_false(status.read_only);
}

#endif
