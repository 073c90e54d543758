// SPDX-License-Identifier: Apache-2.0
//
// One captured graph of attention serves every step of a batch, as attend.h promises: sessions
// grow token by token, blocks are packed, sessions come and go, and only device memory changes.
// Each step gives the same bits as a launch of its own, which knows this step alone.
#include <stdlib.h>

#include "tests/gpu/gpu_kit.h"

using namespace kit;

enum { STEPS = 300, SESSIONS = 3, WINDOW = 64, MOST = 600 };

static void need(int result)
{
    if (result != KVQ_GPU_OK) {
        kvq_gpu_fault(drv, result, "a call", text, sizeof(text));
        fail_msg("%s", text);
    }
}

// ---- A session that grows ----

// All its tokens are there from the start, raw and packed; its page table tells how many count.
static session make_growing(const layer &l, uint32_t q_tokens, std::mt19937 &random)
{
    wish w;
    w.tokens = MOST;
    w.packed = MOST;
    w.keep_raw = w.grows = true;
    w.fresh = w.q_tokens = q_tokens;
    return make_session(l, w, random);
}

// The page table at the same place, and the call, of `tokens` tokens in the cache. Whole blocks
// behind the window are packed, and then have no raw part.
static void grow_to(session &s, const vector<kvq_page> &all, const vector<kvq_page> &device,
                    uint64_t tokens)
{
    const uint64_t packed = tokens < WINDOW ? 0 : (tokens - WINDOW) / 128 * 128;
    const size_t n = (tokens + 127) / 128;
    s.pages.assign(all.begin(), all.begin() + (long)n);
    s.device_pages.assign(device.begin(), device.begin() + (long)n);
    for (size_t i = 0; i < n; i++) {
        const bool is_packed = 128 * (i + 1) <= packed;
        const uint64_t behind = tokens - 128 * i;
        kvq_page *const both[] = {&s.pages[i], &s.device_pages[i]};
        for (kvq_page *p : both) {
            p->tokens = (uint16_t)(behind < 128 ? behind : 128);
            p->packed_tokens = is_packed ? 128 : 0;
            p->raw = is_packed ? NULL : p->raw;
        }
    }
    s.w.tokens = tokens;
    s.w.packed = packed;
    s.call.n_pages = (uint32_t)n;
    s.call.past_tokens = s.call.fresh_start = tokens;
    s.call.q_start = tokens + s.w.fresh - s.w.q_tokens;
    if (n)
        need(drv->copy_in(s.pages_at.at, s.device_pages.data(), n * sizeof(kvq_page), NULL));
}

// ---- The graph ----

// Attention with limits of its own, captured once.
struct captured {
    kvq_gpu_attend_launch launch = {};
    memory batch, workspace;
    vector<uint8_t> bytes;
    kvq_gpu_stream *stream;
    kvq_gpu_graph *graph;
    kvq_gpu_exec *exec;

    captured(const layer &l, const vector<kvq_attend> &largest)
    {
        launch.layer = l.gpu();
        if (kvq_gpu_attend_needs(&launch.layer, largest.data(), NULL, (uint32_t)largest.size(),
                                 &launch.limits, text, sizeof(text)))
            fail_msg("%s", text);
        bytes.resize(kvq_gpu_attend_batch_bytes(&launch.limits));
        batch = memory(bytes.data(), bytes.size());
        const vector<uint8_t> zeros(kvq_gpu_attend_workspace_bytes(&launch.layer, &launch.limits));
        workspace = memory(zeros.data(), zeros.size());
        launch.batch = batch.at;
        launch.workspace = workspace.at;
        launch.blocks = 5;
        need(drv->stream_create(&stream, KVQ_GPU_STREAM_OWN));
        launch.stream = stream;
        need(drv->capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
        if (kvq_gpu_attend(&dev, &launch, text, sizeof(text)))
            fail_msg("%s", text);
        need(drv->capture_end(stream, &graph));
        need(drv->graph_ready(&exec, graph, 0));
    }
    captured(const captured &) = delete;
    captured &operator=(const captured &) = delete;
    ~captured()
    {
        drv->exec_destroy(exec);
        drv->graph_destroy(graph);
        drv->stream_destroy(stream);
    }
    void step(const vector<kvq_attend> &calls)
    {
        if (kvq_gpu_attend_fill(&launch.layer, calls.data(), NULL, (uint32_t)calls.size(),
                                &launch.limits, bytes.data(), text, sizeof(text)))
            fail_msg("%s", text);
        need(drv->stream_sync(NULL)); // page tables are copied there
        need(drv->copy_in(batch.at, bytes.data(), bytes.size(), stream));
        need(drv->graph_launch(exec, stream));
        need(drv->stream_sync(stream));
    }
};

// What lies where a session's output goes.
static vector<uint8_t> output(const session &s)
{
    vector<uint8_t> bytes(s.out_at.size + s.lse_at.size);
    s.out_at.read(bytes.data());
    s.lse_at.read(bytes.data() + s.out_at.size);
    return bytes;
}

static void clear_output(const session &s)
{
    need(drv->fill8(s.out_at.at, 0xff, s.out_at.size, NULL));
    need(drv->fill8(s.lse_at.at, 0xff, s.lse_at.size, NULL));
}

// ---- Steps ----

struct growing {
    session s;
    vector<kvq_page> pages, device_pages; // of all tokens
    uint64_t first;                       // tokens at the start
};

static vector<growing> make_all(const layer &l, std::mt19937 &random)
{
    // 17 query tokens go to the wide kernels: the graph has two launches.
    const struct {
        uint32_t q_tokens;
        uint64_t first;
    } rows[SESSIONS] = {{1, 0}, {2, 290}, {17, 0}};
    vector<growing> all;
    for (const auto &row : rows) {
        growing g = {make_growing(l, row.q_tokens, random), {}, {}, row.first};
        g.pages = g.s.pages;
        g.device_pages = g.s.device_pages;
        all.push_back(std::move(g));
    }
    return all;
}

static vector<kvq_attend> calls_of(const vector<session *> &sessions)
{
    vector<kvq_attend> calls;
    for (const session *s : sessions)
        calls.push_back(s->call);
    return calls;
}

// The first session is there from the start to the end, the others now and then.
static vector<session *> present(vector<growing> &all, uint64_t step)
{
    vector<session *> here;
    for (size_t i = 0; i < all.size(); i++) {
        if (i > 0 && step / 20 % (2 * i + 1) != 1)
            continue;
        grow_to(all[i].s, all[i].pages, all[i].device_pages, all[i].first + step);
        here.push_back(&all[i].s);
    }
    return here;
}

static void check_replay(const char *format, uint64_t stride)
{
    std::mt19937 random(41);
    const layer l = make_layer(format, 64, 1, 1, KVQ_F16, KVQ_V_ROT_NONE, true);
    vector<growing> all = make_all(l, random);
    vector<session *> every;
    for (growing &g : all) {
        grow_to(g.s, g.pages, g.device_pages, g.first + STEPS);
        every.push_back(&g.s);
    }
    captured graph(l, calls_of(every));
    vector<vector<uint8_t>> before(SESSIONS);
    for (uint64_t step = 0; step < STEPS; step += stride) {
        const vector<session *> here = present(all, step);
        for (const session *s : here)
            clear_output(*s);
        graph.step(calls_of(here));
        vector<vector<uint8_t>> replayed;
        for (const session *s : here)
            replayed.push_back(output(*s));
        const vector<result> fresh = run(l, here, run_options());
        for (size_t i = 0; i < here.size(); i++)
            if (replayed[i] != output(*here[i]))
                fail_msg("%s, step %d, session %d: other bits than a launch of its own", format,
                         (int)step, (int)i);
        assert_true(replayed[0] != before[0]); // the lengths count
        before = replayed;
        if (step % 60 == 0)
            assert_true(worst_error(l, *here[0], fresh[0]) <= 1);
    }
}

// The sessions pass 192, 320, 448 and 576 tokens, where one more block is packed.
static void test_replay(void **)
{
    check_replay("oscar2", 1);
}

static void test_other_formats(void **)
{
    for (const char *format : {"vecinfer-2", "innerq-base", "bf16"})
        check_replay(format, 7);
}

int main(void)
{
    const CMUnitTest tests[] = {cmocka_unit_test(test_replay),
                                cmocka_unit_test(test_other_formats)};
    cmocka_set_test_filter(getenv("KVQ_TEST_CASES")); // some cases alone, or with NULL all
    return cmocka_run_group_tests(tests, open_device, close_device);
}
