// SPDX-License-Identifier: Apache-2.0
//
// A digest of weights, images, audio: what tells the names of models and spans apart.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <assert.h>
#include <string.h>

#include "client/kvq.h"

void kvq_digest(const void *data, size_t bytes, uint8_t digest[KVQ_DIGEST_BYTES])
{
    assert(digest && (data || bytes == 0));
    XXH128_canonical_t text;
    static_assert(sizeof text == KVQ_DIGEST_BYTES, "XXH3 of 128 bits");
    XXH128_canonicalFromHash(&text, XXH3_128bits(data, bytes));
    memcpy(digest, &text, sizeof text);
}
