// SPDX-License-Identifier: Apache-2.0
//
// What a store's replies say: XML documents, and the header Content-Range. Replies are foreign:
// bounded, without a document type, and refused as a whole where a field is too long or missing.
#ifndef KVQ_STORAGE_REMOTE_REPLY_H
#define KVQ_STORAGE_REMOTE_REPLY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVQ__REPLY_MAX = 4 << 20, // bytes of a reply; a list of 1000 long keys is 2 MiB
    KVQ__REPLY_ITEMS = 1000,  // in one reply, by S3's rules
    KVQ__UPLOAD_BYTES = 1024, // the id of an upload
    KVQ__ETAG_BYTES = 160,
};

// One Part, Contents or Upload element. Fields that are not there are empty or 0.
struct kvq__reply_item {
    char kind[16];
    char key[1025];
    char upload[KVQ__UPLOAD_BYTES];
    char etag[KVQ__ETAG_BYTES];
    char modified[40]; // LastModified
    uint64_t bytes;
    uint32_t number;
};

struct kvq__reply {
    char root[48];
    char code[64], message[256]; // of an Error
    char upload[KVQ__UPLOAD_BYTES];
    char next[1025];      // NextContinuationToken
    uint32_t next_number; // NextPartNumberMarker
    bool more;            // IsTruncated
};

// Reads a reply. each() may be NULL; what it gives, if not 0, is passed on. Else 0, or
// KVQ_E_REMOTE with a sentence fragment in *why.
int kvq__reply_parse(const void *data, size_t n, struct kvq__reply *out,
                     int (*each)(void *context, const struct kvq__reply_item *item), void *context,
                     const char **why);

// "bytes FROM-LAST/ALL", as the value of a header that ends with a NUL. False: it is not that.
bool kvq__reply_range(const char *value, uint64_t *from, uint64_t *last, uint64_t *all);

// A decimal number without sign or space, up to max. False: it is not that.
bool kvq__reply_number(const char *digits, uint64_t max, uint64_t *out);

#endif
