// SPDX-License-Identifier: Apache-2.0
//
// What tests of attention on a GPU share: caches made by the CPU's functions and copied to the
// device, attention launched over them through the table of driver calls, and attention in double
// precision over what kvq_read_rows says the same caches hold.
#ifndef KVQ_TESTS_GPU_KIT_H
#define KVQ_TESTS_GPU_KIT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/attend.h"
#include "kernels/emu/driver.h"

extern "C" {
#include <cmocka.h>
}

namespace kit
{
using std::vector;

extern const kvq_gpu_driver *drv;
extern kvq_gpu dev;
extern char text[KVQ_GPU_TEXT];

// Device memory with a copy of some bytes; freed with the object.
class memory
{
  public:
    memory() = default;
    memory(const void *from, size_t bytes);
    memory(memory &&other) noexcept;
    memory &operator=(memory &&other) noexcept;
    ~memory();
    template <typename T> T *as() const
    {
        return (T *)(uintptr_t)at;
    }
    void read(void *to) const;
    kvq_gpu_ptr at = 0;
    size_t size = 0;
};

// What a session's cache and call look like.
struct wish {
    uint64_t tokens = 0;   // in pages
    uint64_t packed = 0;   // of them, from the first on; rounded to what the format can
    uint32_t fresh = 0;    // behind them
    uint32_t step = 0;     // of `tokens`, those of this step
    uint32_t q_tokens = 1; // the newest ones
    uint32_t flags = 0;    // of kvq_attend
    int short_page = -1;   // number of a page that holds only 57 tokens
    bool keep_raw = false; // pages keep raw blocks of packed tokens,
    bool grows = false;    // and their rows: a page that counts as packed later is read raw before
    uint8_t q_dtype = KVQ_F16, out_dtype = KVQ_F32, fresh_dtype = KVQ_F32;
};

// One layer; codebooks for those that need them.
struct layer {
    kvq_format format;
    kvq_shape shape;
    vector<float> smooth, k_table, v_table;
    kvq_book book = {}, device_book = {}; // for the CPU and for the device
    memory device_smooth, device_k, device_v;
    kvq_gpu_layer gpu() const;
    const kvq_book *cpu_book() const;
    bool has_book() const;
};

// Codebooks have tables for each sub-vector where that is not too much, or else one for all. With
// `one_table` they have one for all, but if K has factors one for all of a head.
layer make_layer(const char *format, int dim, int gqa, int kv_heads, uint8_t dtype,
                 uint8_t v_rotation = KVQ_V_ROT_NONE, bool one_table = false);

// One session's cache, on the host and on the device, and its call.
struct session {
    wish w;
    vector<vector<uint8_t>> raw, packed; // blocks, 64 bytes of room for alignment behind each
    vector<memory> device_blocks;
    vector<kvq_page> pages, device_pages; // with the pointers of each side
    vector<uint8_t> extras, pool;
    vector<float> fresh_k, fresh_v; // [token][KV head][D], as they count
    vector<float> q;                // [token][query head][D], as they count
    memory pages_at, extras_at, pool_at, fresh_k_at, fresh_v_at, q_at, out_at, lse_at;
    kvq_attend call = {}; // with the device's pointers
    size_t out_row = 0;   // bytes from query head to query head
    uint64_t total() const
    {
        return w.tokens + w.fresh;
    }
};

session make_session(const layer &l, const wish &w, std::mt19937 &random);

// Sinks are read where those of another session are, whose first page it has.
void share_sinks(session &s, const session &from);

// The same cache with another call: other queries and numbers of them.
void renew_call(const layer &l, session &s, const wish &w, std::mt19937 &random);

struct result {
    vector<float> out; // [token][query head][D]
    vector<float> lse;
    bool operator==(const result &other) const;
};

struct run_options {
    uint32_t blocks = 3;
    uint64_t seed = 1;
    bool truncate = false;
    const uint64_t *shared = nullptr;
    uint32_t room = 0; // in the limits, more than needed
};

// Attends to all sessions in one batch.
vector<result> run(const layer &l, const vector<session *> &sessions, const run_options &options);

// Relative errors of rows that leave in fp32, with nothing granted to anybody.
struct tally {
    uint64_t rows = 0, above = 0; // above: of 2e-3
    double squares = 0;
};

// The largest error of any row of a session over what it may be: 2e-3 relative, or more where
// logits are large, see compare().
double worst_error(const layer &l, const session &s, const result &got, tally *strict = nullptr);

int open_device(void **);
int close_device(void **);
} // namespace kit

#endif
