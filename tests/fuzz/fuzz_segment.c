// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the readers of segments and of exported sessions. Their checksums would keep the fuzzer at
// the door, so those of the front and of every record that can be followed are made right first.
// Then the bytes are imported as a session, and opened as the only segment of a store that has lost
// its catalog. Whatever comes of it, both stores must be in order after.
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "tests/store/store_kit.h"

static int look_into(struct kit *k)
{
    struct kvq_store_session of;
    int rc = kvq_store_exported(k->store, "/exported", &of, k->text, sizeof k->text);
    if (rc == 0 && (!memchr(of.name, '\0', sizeof of.name) || !of.name[0]))
        abort();
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 1 << 16 };

static void mend_record(uint8_t *at, uint64_t room, uint64_t salt)
{
    struct kvq_record r;
    memcpy(&r, at, sizeof r);
    memcpy(r.magic, KVQ_RECORD_MAGIC, sizeof r.magic);
    r.version = r.version % 8 == 2 ? 2 : KVQ_RECORD_VERSION;
    if (r.length <= room - sizeof r) {
        uint64_t behind = kvq_record_bytes(r.length) - sizeof r - r.length;
        r.payload = kvq_checksum(at + sizeof r, r.length);
        if (r.length + behind <= room - sizeof r)
            memset(at + sizeof r + r.length, 0, behind);
    }
    r.head = kvq_record_checksum(&r, salt);
    memcpy(at, &r, sizeof r);
}

// Makes the checksums right, record by record for as long as lengths lead from one to the next.
static void mend(uint8_t *bytes, size_t size)
{
    struct kvq_record r;
    uint64_t salt = 0;
    for (uint64_t at = 0; size - at >= sizeof r;) {
        mend_record(bytes + at, size - at, salt);
        memcpy(&r, bytes + at, sizeof r);
        if (at == 0 && size >= KVQ_SEGMENT_FRONT)
            memcpy(&salt, bytes + sizeof r + offsetof(struct kvq_file_head, salt), sizeof salt);
        if (r.length > size - at || kvq_record_bytes(r.length) > size - at)
            return;
        at += kvq_record_bytes(r.length);
    }
}

static void put_file(struct fault_io *disk, const char *path, const uint8_t *bytes, size_t size)
{
    int file = kvq_io_open(&disk->io, path, KVQ_IO_WRITE | KVQ_IO_CREATE);
    if (file < 0 || kvq_io_write(&disk->io, file, bytes, size, 0))
        abort();
    disk->io.close(&disk->io, file);
}

// What is in the store, whatever it is, can be listed and read, and the catalog is sound.
static void look_at(struct kit *k)
{
    static struct kvq_store_session all[8];
    struct kvq_store_verified v;
    char why[256];
    uint32_t n;
    if (!kit_sound(k, why) ||
        kvq_store_list(k->store, NULL, 0, all, 8, &n, k->text, sizeof k->text) ||
        kvq_store_verify(k->store, NULL, NULL, &v, k->text, sizeof k->text))
        abort();
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_stored *blocks;
        size_t count;
        uint64_t good;
        if (kvq_store_blocks(k->store, &all[i], &blocks, &count, k->text, sizeof k->text) ||
            kvq_store_good_tokens(k->store, &all[i], &good, k->text, sizeof k->text) ||
            good > all[i].tokens)
            abort();
        for (size_t j = 0; j < count; j++) {
            void *bytes = malloc(blocks[j].bytes + 1);
            int rc = kvq_store_read(k->store, &blocks[j], bytes, k->text, sizeof k->text);
            if (!bytes || (rc && rc != KVQ_E_DAMAGED))
                abort();
            free(bytes);
        }
        free(blocks);
    }
    kvq_store_close(&k->store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fault_io disk;
    struct kit k = {0};
    uint8_t *copy = malloc(size + 1);
    if (!copy || size == 0 || size > MOST) {
        free(copy);
        return 0;
    }
    memcpy(copy, data, size);
    mend(copy, size);
    for (int as_segment = 0; as_segment < 2; as_segment++) {
        fault_open(&disk, 1);
        put_file(&disk, as_segment ? "/store/segment-0000000000000001.kvqs" : "/exported", copy,
                 size);
        int rc = kit_open(&k, &disk.io);
        if (rc == 0 && !as_segment)
            rc = look_into(&k);
        if (rc == 0 && !as_segment)
            rc = kvq_store_import(k.store, "/exported", NULL, NULL, false, k.text, sizeof k.text);
        if (rc && !k.text[0])
            abort();
        if (k.store)
            look_at(&k);
        fault_close(&disk);
    }
    free(copy);
    return 0;
}
