// SPDX-License-Identifier: Apache-2.0
//
// The table of driver calls and what stands on it: opening the driver's library, loading and
// launching kernels, memory, streams and graphs, on the device of gpu_device.h; and that the
// emulated driver refuses what it says it refuses.
#include <elf.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "kernels/cuda/bundle.h"
#include "kernels/cuda/probe.h"
#include "kernels/emu/driver.h"
#include "tests/gpu/gpu_device.h"

extern "C" {
#include <cmocka.h>
}

using std::vector;

static const kvq_gpu_driver *drv;
static kvq_gpu dev;
static char text[KVQ_GPU_TEXT];

static int open_device(void **)
{
    kvq_emu_set(NULL);
    drv = gpu_device();
    if (kvq_gpu_open(&dev, drv, text, sizeof(text)) != 0)
        fail_msg("%s", text);
    return 0;
}

static int close_device(void **)
{
    kvq_gpu_close(&dev);
    assert_int_equal(kvq_emu_allocations(), 0);
    return 0;
}

// For tests of what only the emulated driver does.
static void need_emulator()
{
    if (!gpu_device_is_emulated())
        skip();
}

static kvq_gpu_ptr alloc(size_t bytes)
{
    kvq_gpu_ptr at = 0;
    assert_int_equal(drv->memory_alloc(&at, bytes), KVQ_GPU_OK);
    return at;
}

static void give_back(kvq_gpu_ptr at)
{
    assert_int_equal(drv->memory_free(at), KVQ_GPU_OK);
}

static void contains(const char *part)
{
    if (!strstr(text, part))
        fail_msg("wanted \"%s\" in: %s", part, text);
}

// ---- The driver's library ----

static void test_no_library(void **)
{
    kvq_gpu_driver d;
    assert_int_equal(kvq_gpu_driver_open(&d, "libkvq-no-such.so.1", text, sizeof(text)), -1);
    contains("libkvq-no-such.so.1 cannot be loaded");
    contains("install");
    assert_null(d.library);
    kvq_gpu_driver_close(&d);
}

// A library that is there and has none of the symbols.
static void test_old_library(void **)
{
    kvq_gpu_driver d;
    assert_int_equal(kvq_gpu_driver_open(&d, "libc.so.6", text, sizeof(text)), -1);
    contains("has no cuInit");
    contains("too old");
    assert_null(d.library);
}

static void test_no_context(void **)
{
    kvq_gpu other;
    kvq_gpu_context *context;
    assert_int_equal(drv->context_get(&context), KVQ_GPU_OK);
    assert_int_equal(drv->context_set(NULL), KVQ_GPU_OK);
    assert_int_equal(kvq_gpu_open(&other, drv, text, sizeof(text)), -1);
    contains("no GPU context is current");
    assert_int_equal(drv->context_set(context), KVQ_GPU_OK);
    assert_int_equal(other.n_modules, 0);
}

// A kernel that the list has and the module lacks.
static void test_missing_kernel(void **)
{
    need_emulator();
    kvq_gpu other;
    const kvq_emu_kernel none = {"kvq_gpu_nothing", NULL, 0};
    assert_int_equal(kvq_gpu_open(&other, kvq_emu_driver_with(&none, 1), text, sizeof(text)), -1);
    contains(kvq_gpu_kernel_name((kvq_gpu_kernel)0));
    contains("not found");
    open_device(NULL);
}

// No launch has to make threads' stacks larger, for which the driver would wait for all work of the
// context: opening the kernels has done it.
static void test_stack(void **)
{
    size_t stack = 0;
    int most = 0;
    assert_int_equal(drv->limit_get(&stack, KVQ_GPU_LIMIT_STACK), KVQ_GPU_OK);
    for (kvq_gpu_function *f : dev.functions) {
        int bytes = 0;
        assert_int_equal(drv->function_get(&bytes, KVQ_GPU_LOCAL_BYTES, f), KVQ_GPU_OK);
        most = bytes > most ? bytes : most;
    }
    assert_true(stack >= (size_t)most);
    if (gpu_device_is_emulated())
        assert_true(most > 1024); // what CUDA begins with
}

// ---- Which cubins a device gets ----

static vector<const void *> loaded;

static int note_image(kvq_gpu_module **module, const void *image)
{
    *module = (kvq_gpu_module *)&loaded;
    loaded.push_back(image);
    return KVQ_GPU_OK;
}

// Opens a device of this capability that takes cubins; kernels are still found in the emulator.
static int open_capability(int capability, kvq_gpu *gpu)
{
    static kvq_gpu_driver takes_images;
    kvq_emu_options options = {};
    options.capability = capability;
    takes_images = *drv;
    takes_images.kernels_inside = false;
    takes_images.module_load = note_image;
    loaded.clear();
    kvq_emu_set(&options);
    const int result = kvq_gpu_open(gpu, &takes_images, text, sizeof(text));
    kvq_emu_set(NULL);
    return result;
}

static int cuda_12_8(int *version)
{
    *version = 12080;
    return KVQ_GPU_OK;
}

// Kernels of a newer compiler are refused before anything is loaded, with the driver that has it.
static void test_older_driver_than_compiler(void **)
{
    kvq_gpu_driver old = *drv;
    old.name = "libcuda.so.1";
    old.version = cuda_12_8;
    assert_int_equal(kvq_gpu_driver_check(&old, 0, text, sizeof(text)), 0);
    assert_int_equal(kvq_gpu_driver_check(&old, 12, text, sizeof(text)), 0);
    assert_int_equal(kvq_gpu_driver_check(&old, 13, text, sizeof(text)), -1);
    contains("CUDA 12.8");
    contains("driver 580 or later");
    if (kvq_gpu_images_cuda() <= 12)
        return; // there are none, or older ones
    kvq_gpu gpu;
    old.kernels_inside = false;
    assert_int_equal(kvq_gpu_open(&gpu, &old, text, sizeof(text)), -1);
    contains("driver 580 or later");
}

static void test_places(void **)
{
    kvq_gpu_uuid uuid = {};
    char place[KVQ_GPU_PLACE_BYTES];
    for (int i = 0; i < 16; i++)
        uuid.bytes[i] = (uint8_t)(0x10 + i);
    kvq_gpu_place(&uuid, "NVIDIA H100", place);
    assert_string_equal(place, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
    kvq_gpu_place(&uuid, "NVIDIA H100 MIG 1g.10gb", place);
    assert_string_equal(place, "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f");
    assert_true(kvq_gpu_place_is("GPU-10111213-1415-1617-1819-1A1B1C1D1E1F", place));
    assert_false(kvq_gpu_place_is("GPU-10111213-1415-1617-1819-1a1b1c1d1e10", place));
    assert_false(kvq_gpu_place_is("host", place));
    assert_false(kvq_gpu_place_is("host", "host"));
}

static void test_choice_of_images(void **)
{
    need_emulator();
    const int cases[][2] = {{80, 80},   {86, 80},   {89, 80}, {90, 90}, {100, 100}, {103, 100},
                            {120, 120}, {121, 120}, {75, 0},  {110, 0}, {91, 0},    {130, 0}};
    const kvq_gpu_image *images = kvq_gpu_images();
    kvq_gpu gpu;
    if (!images->name) {
        assert_int_equal(open_capability(90, &gpu), -1);
        contains("built without GPU kernels");
        contains("-DKVQ_CUDA=ON");
        skip();
    }
    for (const auto &c : cases) {
        vector<const void *> want;
        for (const kvq_gpu_image *i = images; i->name; i++)
            if (i->capability == c[1])
                want.push_back(i->bytes);
        if (c[1] != 0 && want.empty())
            continue; // not compiled for it
        const int result = open_capability(c[0], &gpu);
        assert_int_equal(result, c[1] ? 0 : -1);
        assert_true(loaded == want);
        if (c[1] == 0)
            contains("build it with -DKVQ_CUDA_ARCHITECTURES");
        kvq_gpu_close(&gpu);
    }
}

// ---- Kernels from another process ----

// The smallest file that has the form of a cubin, with one section of some bytes.
static vector<uint8_t> fake_cubin(uint8_t fill, size_t bytes)
{
    Elf64_Ehdr e = {};
    Elf64_Shdr s = {};
    vector<uint8_t> file(sizeof(e) + bytes + sizeof(s), fill);
    memcpy(e.e_ident, ELFMAG, SELFMAG);
    e.e_ident[EI_CLASS] = ELFCLASS64;
    e.e_shoff = sizeof(e) + bytes;
    e.e_shnum = 1;
    e.e_shentsize = sizeof(s);
    s.sh_offset = sizeof(e);
    s.sh_size = bytes;
    memcpy(file.data(), &e, sizeof(e));
    memcpy(file.data() + sizeof(e) + bytes, &s, sizeof(s));
    return file;
}

static int open_bundle(const vector<uint8_t> &bundle, kvq_gpu *gpu)
{
    static kvq_gpu_driver takes_images;
    takes_images = *drv;
    takes_images.kernels_inside = false;
    takes_images.module_load = note_image;
    loaded.clear();
    text[0] = 0;
    const int result =
        kvq_gpu_open_bundle(gpu, &takes_images, bundle.data(), bundle.size(), text, sizeof(text));
    assert_true(result == 0 || (result == -1 && text[0] && gpu->n_modules == 0));
    return result;
}

// What one process has loaded, another loads from the bytes that it was handed.
static void test_bundle(void **)
{
    need_emulator();
    kvq_gpu gpu;
    assert_int_equal(kvq_gpu_open(&gpu, drv, text, sizeof(text)), 0);
    const int capability = gpu.capability;
    assert_int_equal(gpu.image_capability, 0);
    kvq_gpu_close(&gpu);
    const vector<uint8_t> a = fake_cubin(1, 100), b = fake_cubin(2, 4096), c = fake_cubin(3, 64);
    const kvq_gpu_image images[] = {
        {capability, false, "a", a.data(), a.data() + a.size()},
        {capability + 10, false, "c", c.data(), c.data() + c.size()},
        {capability, false, "b", b.data(), b.data() + b.size()},
        {0, false, NULL, NULL, NULL},
    };
    assert_int_equal(kvq_gpu_bundle_bytes(images, 0), 0);
    vector<uint8_t> bundle(kvq_gpu_bundle_bytes(images, capability));
    kvq_gpu_bundle_write(images, capability, bundle.data());
    assert_int_equal(open_bundle(bundle, &gpu), 0);
    assert_int_equal(gpu.image_capability, capability);
    assert_int_equal(loaded.size(), 2);
    assert_memory_equal(loaded[0], a.data(), a.size());
    assert_memory_equal(loaded[1], b.data(), b.size());
    kvq_gpu_close(&gpu);
    for (size_t n = 0; n < bundle.size(); n += n < 512 ? 1 : 64) { // cut off anywhere
        const vector<uint8_t> part(bundle.begin(), bundle.begin() + (ptrdiff_t)n);
        assert_int_equal(open_bundle(part, &gpu), -1);
    }
    for (size_t at = 0; at + 4 <= 512; at += 4) // any number wrong
        for (const uint32_t word : {0u, 1u, 17u, 0x7fffffffu, 0x80000000u, UINT32_MAX}) {
            vector<uint8_t> wrong = bundle;
            memcpy(&wrong[at], &word, 4);
            if (open_bundle(wrong, &gpu) == 0)
                kvq_gpu_close(&gpu);
        }
}

// The driver of other kernels, or kernels for another driver.
static void test_no_bundle(void **)
{
    need_emulator();
    kvq_gpu gpu;
    char ours[KVQ_GPU_KERNELS_TEXT];
    kvq_gpu_kernels_text(ours);
    assert_non_null(strstr(ours, "attend "));
    assert_true(strlen(ours) + 1 < KVQ_GPU_KERNELS_TEXT);
    assert_int_equal(open_bundle({}, &gpu), -1);
    assert_int_equal(kvq_gpu_open_bundle(&gpu, drv, NULL, 0, text, sizeof(text)), 0);
    kvq_gpu_close(&gpu);
    assert_int_equal(kvq_gpu_open_bundle(&gpu, drv, "KVQK", 4, text, sizeof(text)), -1);
    contains("use the libkvq that came with the daemon");
}

// Whether n bytes have a zero-ended string somewhere.
static bool has_string(const uint8_t *bytes, size_t n, const char *string)
{
    return memmem(bytes, n, string, strlen(string) + 1) != NULL;
}

// The cubins of each capability have, together, every kernel of the list.
static void test_images_have_kernels(void **)
{
    const kvq_gpu_image *images = kvq_gpu_images();
    if (!images->name)
        skip();
    for (const kvq_gpu_image *one = images; one->name; one++) {
        uint64_t sections;
        assert_memory_equal(one->bytes, "\177ELF", 4);
        for (int kernel = 0; kernel < KVQ_KERNELS; kernel++) {
            bool found = false;
            char section[128];
            snprintf(section, sizeof(section), ".text.%s",
                     kvq_gpu_kernel_name((kvq_gpu_kernel)kernel));
            for (const kvq_gpu_image *i = images; i->name; i++) {
                memcpy(&sections, (const uint8_t *)i->bytes + 40, 8); // they stand behind the rest
                found |= i->capability == one->capability &&
                         has_string((const uint8_t *)i->bytes, sections, section);
            }
            if (!found)
                fail_msg("no cubin for capability %d has %s", one->capability, section);
        }
    }
}

// ---- A launch ----

struct mma_memory {
    kvq_gpu_ptr a, b, c, d;
};

static mma_memory mma_alloc()
{
    const mma_memory m = {alloc(32 * 4 * 4), alloc(32 * 2 * 4), alloc(32 * 4 * 4),
                          alloc(32 * 4 * 4)};
    return m;
}

static void mma_free(const mma_memory &m)
{
    for (const kvq_gpu_ptr at : {m.a, m.b, m.c, m.d})
        give_back(at);
}

static kvq_gpu_probe_mma_args mma_args(const mma_memory &m)
{
    const kvq_gpu_probe_mma_args args = {(const uint32_t *)m.a, (const uint32_t *)m.b,
                                         (const float *)m.c, (float *)m.d};
    return args;
}

// Every a is the subnormal 2^-24 times (row + 1), every b is 1, c is the row: d = row + 16 a.
static void fill_mma(const mma_memory &m)
{
    vector<uint32_t> a(32 * 4), b(32 * 2, 0x3c003c00u);
    vector<float> c(32 * 4);
    for (int lane = 0; lane < 32; lane++) {
        for (int r = 0; r < 4; r++) {
            const uint32_t row = (lane >> 2) + 8 * (r & 1);
            a[4 * lane + r] = (row + 1) | (row + 1) << 16;
            c[4 * lane + r] = 0.5f * ((lane >> 2) + 8 * (r >> 1));
        }
    }
    assert_int_equal(drv->copy_in(m.a, a.data(), a.size() * 4, NULL), KVQ_GPU_OK);
    assert_int_equal(drv->copy_in(m.b, b.data(), b.size() * 4, NULL), KVQ_GPU_OK);
    assert_int_equal(drv->copy_in(m.c, c.data(), c.size() * 4, NULL), KVQ_GPU_OK);
}

static void check_mma(const mma_memory &m)
{
    float d[32 * 4];
    assert_int_equal(drv->copy_out(d, m.d, sizeof(d), NULL), KVQ_GPU_OK);
    assert_int_equal(drv->context_sync(), KVQ_GPU_OK);
    for (int lane = 0; lane < 32; lane++) {
        for (int r = 0; r < 4; r++) {
            const int row = (lane >> 2) + 8 * (r >> 1);
            // Tensor cores align the terms to the largest exponent with 2 to 3 bits more than fp32
            // has, and cut each of the 16: they are off by four units of its last place at most.
            const float want = (float)(0.5 * row + 16 * (row + 1) * 0x1p-24);
            assert_true(fabsf(d[4 * lane + r] - want) <= 4 * (nextafterf(want, INFINITY) - want));
        }
    }
}

static void test_launch(void **)
{
    const mma_memory m = mma_alloc();
    fill_mma(m);
    const kvq_gpu_probe_mma_args args = mma_args(m);
    const kvq_gpu_grid grid = {1, 1, 32, 0, NULL};
    if (kvq_gpu_launch(&dev, KVQ_KERNEL_PROBE_MMA, &grid, &args, sizeof(args), text,
                       sizeof(text)) != 0)
        fail_msg("%s", text);
    check_mma(m);
    mma_free(m);
}

// Recorded once, run twice, with other memory contents each time.
static void test_graph(void **)
{
    const mma_memory m = mma_alloc();
    const kvq_gpu_probe_mma_args args = mma_args(m);
    assert_int_equal(drv->fill8(m.d, 0xff, 32 * 4 * 4, NULL), KVQ_GPU_OK);
    assert_int_equal(drv->context_sync(), KVQ_GPU_OK);
    kvq_gpu_stream *stream;
    kvq_gpu_graph *graph;
    kvq_gpu_exec *exec;
    assert_int_equal(drv->stream_create(&stream, KVQ_GPU_STREAM_OWN), KVQ_GPU_OK);
    assert_int_equal(drv->capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED), KVQ_GPU_OK);
    const kvq_gpu_grid grid = {1, 1, 32, 0, stream};
    assert_int_equal(drv->fill32(m.d, 0, 32 * 4, stream), KVQ_GPU_OK);
    assert_int_equal(
        kvq_gpu_launch(&dev, KVQ_KERNEL_PROBE_MMA, &grid, &args, sizeof(args), text, sizeof(text)),
        0);
    assert_int_equal(drv->capture_end(stream, &graph), KVQ_GPU_OK);
    assert_int_equal(drv->graph_ready(&exec, graph, 0), KVQ_GPU_OK);
    assert_int_equal(drv->graph_destroy(graph), KVQ_GPU_OK);
    float before;
    assert_int_equal(drv->copy_out(&before, m.d, 4, NULL), KVQ_GPU_OK);
    assert_true(isnan(before)); // nothing ran yet
    for (int i = 0; i < 2; i++) {
        fill_mma(m);
        assert_int_equal(drv->context_sync(), KVQ_GPU_OK); // the stream does not wait for it
        assert_int_equal(drv->graph_launch(exec, stream), KVQ_GPU_OK);
        assert_int_equal(drv->stream_sync(stream), KVQ_GPU_OK);
        check_mma(m);
        assert_int_equal(drv->fill8(m.a, 0xff, 32 * 4 * 4, NULL), KVQ_GPU_OK);
    }
    assert_int_equal(drv->exec_destroy(exec), KVQ_GPU_OK);
    assert_int_equal(drv->stream_destroy(stream), KVQ_GPU_OK);
    mma_free(m);
}

// ---- Refusals of the emulated driver ----

static void refused(const kvq_gpu_grid &grid, size_t bytes, const char *why)
{
    const kvq_gpu_probe_mma_args args[2] = {};
    assert_int_equal(
        kvq_gpu_launch(&dev, KVQ_KERNEL_PROBE_MMA, &grid, args, bytes, text, sizeof(text)), -1);
    contains("kvq_gpu_probe_mma");
    contains(why);
}

static void test_bad_launches(void **)
{
    need_emulator();
    const size_t bytes = sizeof(kvq_gpu_probe_mma_args);
    refused({1, 1, 32, 0, NULL}, bytes + 8, "another size");
    refused({0, 1, 32, 0, NULL}, bytes, "cannot have");
    refused({1, 65536, 32, 0, NULL}, bytes, "cannot have");
    refused({1, 1, 2048, 0, NULL}, bytes, "at most 1024");
    refused({1, 1, 32, dev.shared_bytes + 16, NULL}, bytes, "of shared memory");
}

static void test_bad_memory(void **)
{
    need_emulator();
    uint8_t host[64] = {};
    const kvq_gpu_ptr at = alloc(48);
    assert_int_equal(drv->copy_in(at, host, 48, NULL), KVQ_GPU_OK);
    assert_int_equal(drv->copy_in(at, host, 49, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv->copy_in(at + 40, host, 16, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv->copy_out(host, at - 16, 16, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv->copy_device(at, at + 32, 32, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv->fill32(at + 2, 0, 1, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv->memory_free(at + 16), KVQ_GPU_INVALID_VALUE);
    give_back(at);
    assert_int_equal(drv->copy_out(host, at, 16, NULL), KVQ_GPU_INVALID_VALUE);
    kvq_gpu_ptr none;
    assert_int_equal(drv->memory_alloc(&none, (size_t)65 << 30), KVQ_GPU_OUT_OF_MEMORY);
}

static void test_waits(void **)
{
    need_emulator();
    const kvq_gpu_ptr at = alloc(8);
    assert_int_equal(drv->stream_write64(NULL, at, 5, 0), KVQ_GPU_OK);
    assert_int_equal(drv->stream_wait64(NULL, at, 5, KVQ_GPU_WAIT_AT_LEAST), KVQ_GPU_OK);
    const int result = drv->stream_wait64(NULL, at, 6, KVQ_GPU_WAIT_AT_LEAST);
    assert_int_equal(kvq_gpu_fault(drv, result, "waiting", text, sizeof(text)), -1);
    contains("waits for 6, and 5 stands there");
    give_back(at);
}

struct write_args {
    uint8_t *at;
};

static void write_byte(const write_args &a)
{
    if (gpu::lane() == 0)
        *a.at = 1;
}

static void run_write(const void *args)
{
    write_byte(*(const write_args *)args);
}

// A plain store behind the end of a piece is found after the launch.
static void test_spill(void **)
{
    need_emulator();
    const kvq_emu_kernel mine = {"write_byte", run_write, sizeof(write_args)};
    drv = kvq_emu_driver_with(&mine, 1);
    kvq_gpu_function *f;
    assert_int_equal(drv->module_function(&f, NULL, "write_byte"), KVQ_GPU_OK);
    const kvq_gpu_ptr at = alloc(100);
    for (size_t offset = 99; offset <= 100; offset++) {
        write_args a = {(uint8_t *)at + offset};
        size_t bytes = sizeof(a);
        void *extra[] = {(void *)1, &a, (void *)2, &bytes, NULL};
        const int result = drv->launch(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, extra);
        assert_int_equal(result, offset < 100 ? KVQ_GPU_OK : KVQ_GPU_LAUNCH_FAILED);
    }
    kvq_gpu_fault(drv, KVQ_GPU_LAUNCH_FAILED, "launch", text, sizeof(text));
    contains("written 0 bytes behind the end of a piece of 100");
    give_back(at);
    open_device(NULL);
}

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(test_no_library),
        cmocka_unit_test(test_old_library),
        cmocka_unit_test(test_older_driver_than_compiler),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_no_context),
        cmocka_unit_test(test_stack),
        cmocka_unit_test(test_missing_kernel),
        cmocka_unit_test(test_choice_of_images),
        cmocka_unit_test(test_images_have_kernels),
        cmocka_unit_test(test_bundle),
        cmocka_unit_test(test_no_bundle),
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_graph),
        cmocka_unit_test(test_bad_launches),
        cmocka_unit_test(test_bad_memory),
        cmocka_unit_test(test_waits),
        cmocka_unit_test(test_spill),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
