// SPDX-License-Identifier: Apache-2.0
//
// kvq_digest: XXH3 of 128 bits, as it is written down for all machines, wherever the bytes lie; and
// no bit that does not count.
#include "tests/kits/unit.h"

#include "client/kvq.h"

static void expect(const void *data, size_t bytes, const char *digest)
{
    uint8_t found[KVQ_DIGEST_BYTES];
    char text[2 * KVQ_DIGEST_BYTES + 1];
    kvq_digest(data, bytes, found);
    for (int i = 0; i < KVQ_DIGEST_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", found[i]);
    assert_string_equal(text, digest);
}

// What libxxhash 0.8.1 gives.
PLAIN_TEST(test_known)
{
    static char text[] = "-kvq keeps keys and values";
    expect(NULL, 0, "99aa06d3014798d86001c324468d497f");
    expect(text + 1, sizeof text - 2, "f5a336269499dd25b10d00236dca51bb");
}

PLAIN_TEST(test_every_bit_counts)
{
    enum { BYTES = 2500 };
    static uint8_t data[BYTES + 1];
    uint8_t first[KVQ_DIGEST_BYTES], other[KVQ_DIGEST_BYTES];
    for (int i = 0; i < BYTES; i++)
        data[i] = (uint8_t)(i * 37);
    kvq_digest(data, BYTES, first);
    for (int bit = 0; bit < 8 * BYTES; bit++) {
        data[bit / 8] ^= 1u << bit % 8;
        kvq_digest(data, BYTES, other);
        assert_memory_not_equal(first, other, sizeof first);
        data[bit / 8] ^= 1u << bit % 8;
    }
    // Two signs of floats at once, a length, and other places of the same bytes.
    data[3] ^= 0x80, data[11] ^= 0x80;
    kvq_digest(data, BYTES, other);
    assert_memory_not_equal(first, other, sizeof first);
    data[3] ^= 0x80, data[11] ^= 0x80;
    kvq_digest(data, BYTES + 1, other);
    assert_memory_not_equal(first, other, sizeof first);
    memmove(data + 1, data, BYTES);
    kvq_digest(data + 1, BYTES, other);
    assert_memory_equal(first, other, sizeof first);
}

int main(void)
{
    return run_all(NULL, NULL);
}
