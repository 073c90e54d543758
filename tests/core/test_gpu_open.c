// SPDX-License-Identifier: Apache-2.0
//
// Opening GPUs of which one cannot be used: it is left out if nobody has named it.
#include <stdlib.h>

#include "daemon/core/gpu/gpu.h"
#include "tests/kits/unit.h"

enum { UNAVAILABLE = 46 }; // CUDA's answer for a GPU that another process has for itself

static struct kvq_gpu_driver real, table;
static bool broken[2];

static int context_retain(struct kvq_gpu_context **context, int device)
{
    return broken[device] ? UNAVAILABLE : real.context_retain(context, device);
}

static int open_gpus(const char *devices, struct kvq__gpus **gpus, char *text)
{
    const struct kvq__gpus_config config = {
        .table = &table, .devices = devices, .bytes = 24 << 20, .extent_bytes = 2 << 20};
    return kvq__gpus_open(&config, gpus, text);
}

static char first[KVQ__GPU_UUID_TEXT], second[KVQ__GPU_UUID_TEXT];

static int begin(void **state)
{
    struct kvq__gpus *gpus;
    char text[KVQ_TEXT_BYTES] = "";
    (void)state;
    setenv("KVQ_EMU_DEVICES", "2", 1);
    assert_int_equal(kvq_gpu_driver_open(&real, KVQ_EMU_LIBRARY, text, sizeof text), 0);
    table = real;
    table.library = NULL; // stays open
    table.context_retain = context_retain;
    assert_int_equal(open_gpus(NULL, &gpus, text), 0);
    assert_int_equal(kvq__gpus_count(gpus), 2);
    assert_null(kvq__gpus_skipped(gpus, 0));
    memcpy(first, kvq__gpu_uuid_text(kvq__gpus_get(gpus, 0)), sizeof first);
    memcpy(second, kvq__gpu_uuid_text(kvq__gpus_get(gpus, 1)), sizeof second);
    kvq__gpus_close(&gpus);
    return 0;
}

static int end(void **state)
{
    (void)state;
    kvq_gpu_driver_close(&real);
    return 0;
}

PLAIN_TEST(test_one_of_two)
{
    struct kvq__gpus *gpus;
    char text[KVQ_TEXT_BYTES] = "";
    broken[0] = true;
    assert_int_equal(open_gpus("", &gpus, text), 0);
    assert_int_equal(kvq__gpus_count(gpus), 1);
    assert_string_equal(kvq__gpu_uuid_text(kvq__gpus_get(gpus, 0)), second);
    assert_non_null(kvq__gpus_skipped(gpus, 0));
    assert_non_null(strstr(kvq__gpus_skipped(gpus, 0), first));
    assert_null(kvq__gpus_skipped(gpus, 1));
    kvq__gpus_close(&gpus);
    broken[0] = false;
}

PLAIN_TEST(test_named)
{
    struct kvq__gpus *gpus;
    char text[KVQ_TEXT_BYTES] = "";
    broken[0] = true;
    assert_int_equal(open_gpus(first, &gpus, text), KVQ_E_SYSTEM);
    assert_null(gpus);
    assert_non_null(strstr(text, first));
    assert_int_equal(open_gpus(second, &gpus, text), 0);
    assert_int_equal(kvq__gpus_count(gpus), 1);
    assert_null(kvq__gpus_skipped(gpus, 0));
    kvq__gpus_close(&gpus);
    broken[0] = false;
}

PLAIN_TEST(test_none_left)
{
    struct kvq__gpus *gpus;
    char text[KVQ_TEXT_BYTES] = "";
    broken[0] = broken[1] = true;
    assert_int_equal(open_gpus(NULL, &gpus, text), KVQ_E_UNSUPPORTED);
    assert_null(gpus);
    assert_non_null(strstr(text, second));
    broken[0] = broken[1] = false;
}

int main(void)
{
    return run_all(begin, end);
}
