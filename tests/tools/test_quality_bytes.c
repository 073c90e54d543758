// SPDX-License-Identifier: Apache-2.0
//
// The bytes that the quality bench compares formats at: those of sessions.
#include <stdio.h>

#include "kernels/sizes.h"
#include "tests/kits/unit.h"
#include "tools/kvq-bench/quality.h"

static const struct kvq_shape shape = {
    .q_heads = 2, .kv_heads = 2, .k_dim = 128, .v_dim = 128, .dtype = KVQ_F16, .scale = 1};

static struct quality_method method(const char *name)
{
    char text[400];
    struct quality_method m;
    if (quality_method_parse(name, &m, text, sizeof text))
        fail_msg("%s: %s", name, text);
    return m;
}

PLAIN_TEST(bytes)
{
    struct quality_method oscar2 = method("oscar2"), f16 = method("f16");
    struct quality_method dropped = method("dropped"), int2 = method("int2-token");
    assert_true(quality_packed_bytes(&oscar2, &shape) == 98);
    assert_true(quality_packed_bytes(&f16, &shape) == 512);
    assert_true(quality_packed_bytes(&dropped, &shape) == 0);
    assert_true(quality_packed_bytes(&int2, &shape) == 72);
    // The newest block has room for 128 tokens, or for 32.
    assert_true(quality_bytes_at(&f16, &shape, 1000) == 1024 * 512);
    assert_true(quality_bytes_at(&oscar2, &shape, 1000) == 896 * 98 + 128 * 512);
    assert_true(quality_bytes_at(&oscar2, &shape, 10) == 32 * 512);
    assert_true(quality_bytes_at(&dropped, &shape, 1024 + 10) == 32 * 512);
    assert_true(quality_bytes_at(&int2, &shape, 1024 + 10) == 1024 * 72 + 32 * 512);
    assert_int_equal(quality_window_for(&f16, &shape, 1000, 1024 * 512 - 1), -1);
    assert_int_equal(quality_window_for(&f16, &shape, 1000, 1024 * 512), 1000);
    assert_int_equal(quality_window_for(&oscar2, &shape, 1024, 1024 * 98 - 1), -1);
    assert_int_equal(quality_window_for(&oscar2, &shape, 1024, 1024 * 98), 0);
    assert_int_equal(quality_window_for(&dropped, &shape, 1024, 512 * 300), 256);
}

// What `kvqctl size` says of a session's layer that has outliers, if the format has them.
static double session_bytes(const struct kvq_format *f, uint64_t tokens)
{
    struct kvq_format every = *f;
    every.plain_layers = 0;
    struct kvq_session_bytes all = kvq_session_bytes_of(&every, &shape, NULL, 1, tokens, 0);
    return (double)(all.packed + all.window) / shape.kv_heads;
}

static void check_windows(const struct quality_method *m, uint64_t tokens, double budget)
{
    struct kvq_format f = m->f;
    int64_t window = quality_window_for(m, &shape, tokens, budget);
    for (uint64_t w = tokens % f.unit_tokens; w <= tokens; w += f.unit_tokens) {
        f.recent_tokens = (uint16_t)w;
        double bytes = session_bytes(&f, tokens);
        if (w == (uint64_t)window ? bytes > budget : (int64_t)w > window && bytes <= budget)
            fail_msg("%s: of %u tokens %d are raw for %g bytes, but %u take %g", m->name,
                     (unsigned)tokens, (int)window, budget, (unsigned)w, bytes);
    }
}

// Bytes are those that a session has, with the format's own window and with any other.
PLAIN_TEST(bytes_of_sessions)
{
    static const uint32_t lengths[] = {1, 100, 128, 160, 640, 1000, 1024, 2112};
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        struct quality_method m = method(f->name);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            double is = quality_bytes_at(&m, &shape, lengths[i]), raw = lengths[i] * 512.0;
            if (is != session_bytes(f, lengths[i]))
                fail_msg("%s: %u tokens take %g bytes", f->name, lengths[i], is);
            for (double part = 0.05; lengths[i] >= 640 && !kvq_is_raw(f) && part < 1; part += 0.07)
                check_windows(&m, lengths[i], part * raw);
        }
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
