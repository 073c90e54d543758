// SPDX-License-Identifier: Apache-2.0
//
// Structures of the interface that can grow. They begin with the size that they had where their
// user was compiled, which may be an earlier or a later version than the library's.
#include "client/internal.h"

#include <assert.h>
#include <string.h>

// No version will have larger ones: what is said to be is uninitialized, and not looked at.
enum { MOST_BYTES = 4096 };

// A later version's new field must not lie in what is padding here.
#define ENDS_WITH(type, last)                                                                      \
    static_assert(sizeof(struct type) ==                                                           \
                      offsetof(struct type, last) + sizeof(((struct type *)0)->last),              \
                  #type " ends in padding: put a smaller field further up")
ENDS_WITH(kvq_connect_options, name);
ENDS_WITH(kvq_session_options, prefix);
ENDS_WITH(kvq_local_options, parallel_context);
ENDS_WITH(kvq_bucket_options, max_tokens);
ENDS_WITH(kvq_capture_options, max_tokens);

static int check_size(uint32_t size, const char *name)
{
    if (size > sizeof size && size <= MOST_BYTES && size % _Alignof(uint64_t) == 0)
        return KVQ_OK;
    return kvq__set_error(KVQ_E_INVALID, "struct %s: size is %u; set it to sizeof(struct %s)", name,
                          size, name);
}

int kvq__sized_take(void *to, size_t known, const void *from, const char *name)
{
    uint32_t size;
    const uint8_t *bytes = from;
    assert(known > sizeof size && known <= MOST_BYTES);
    memcpy(&size, from, sizeof size);
    int rc = check_size(size, name);
    if (rc)
        return rc;
    for (size_t i = known; i < size; i++)
        if (bytes[i])
            return kvq__set_error(
                KVQ_E_UNSUPPORTED,
                "struct %s: byte %zu of %u is set, but libkvq %s knows %zu bytes: "
                "install a library as new as the headers, or leave that field 0",
                name, i, size, kvq_version(), known);
    memset(to, 0, known);
    memcpy(to, from, size < known ? size : known);
    return KVQ_OK;
}

int kvq__sized_check(const void *to, const char *name)
{
    uint32_t size;
    memcpy(&size, to, sizeof size);
    return check_size(size, name);
}

void kvq__sized_give(void *to, const void *from, size_t known)
{
    uint32_t size;
    memcpy(&size, to, sizeof size);
    assert(size > sizeof size && size <= MOST_BYTES);
    size_t both = size < known ? size : known;
    memcpy((uint8_t *)to + sizeof size, (const uint8_t *)from + sizeof size, both - sizeof size);
    memset((uint8_t *)to + both, 0, size - both);
}
