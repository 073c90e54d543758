// SPDX-License-Identifier: Apache-2.0
//
// The smallest engine with a batch: two sessions of different lengths, two layers, one step at a
// time. cc minimal.c $(pkg-config --cflags --libs kvq)
#include <kvq.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, DIM = 128, FLOATS = 1 << 16 };

static void check(int code)
{
    if (code) {
        fprintf(stderr, "%s\n", kvq_error_text());
        exit(1);
    }
}

// Stands for your model: K and V of every new token, Q of every new token.
static void compute(float *values, int token)
{
    for (int i = 0; i < FLOATS / 2; i++)
        values[i] = (float)((i * 31 + token * 17) % 101 - 50) / 50;
}

int main(void)
{
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer;
    struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = LAYERS};
    struct kvq_session_options options = {
        .size = sizeof options, .layers = &layer, .n_layers = 1, .format = "kvq2"};
    struct kvq_entry batch[BATCH] = {0};
    struct kvq_work work = {0};
    check(kvq_connect(NULL, &client));
    check(kvq_queue_open(client, &queue));
    check(kvq_buffer_create(client, FLOATS * sizeof(float), &buffer));
    work.k = kvq_tensor_make(buffer, 0, KV_HEADS, DIM, KVQ_DTYPE_F32);
    work.v = kvq_tensor_make(buffer, 16 * 1024, KV_HEADS, DIM, KVQ_DTYPE_F32);
    work.q = kvq_tensor_make(buffer, 32 * 1024, Q_HEADS, DIM, KVQ_DTYPE_F32);
    work.out = kvq_tensor_make(buffer, 128 * 1024, Q_HEADS, DIM, KVQ_DTYPE_F32);
    work.lse = kvq_tensor_make(buffer, 192 * 1024, Q_HEADS, 1, KVQ_DTYPE_F32);
    for (int s = 0; s < BATCH; s++)
        check(kvq_session_open(client, &options, &batch[s].session, NULL));

    for (int token = 0; token < 300; token++) {
        // In its first step each session has 5 and 6 tokens at once, a tiny prompt; then one.
        for (uint32_t s = 0, row = 0; s < BATCH; row += batch[s++].append) {
            batch[s].append = token == 0 ? 5 + s : 1;
            batch[s].queries = (uint16_t)batch[s].append;
            batch[s].row = batch[s].q_row = row;
        }
        check(kvq_step_begin(queue, batch, BATCH, &work.step));
        for (int s = 0; s < BATCH; s++)
            check(batch[s].status);
        for (work.layer = 0; work.layer < LAYERS; work.layer++) {
            compute(kvq_buffer_data(buffer), token);
            check(kvq_append_attend(queue, &work, batch, BATCH));
            for (int s = 0; s < BATCH; s++)
                check(batch[s].status); // one session's failure is its own
        }
        check(kvq_step_end(queue, work.step, batch, BATCH));
        for (int s = 0; s < BATCH; s++) {
            check(batch[s].status);
            batch[s].position = batch[s].value;
        }
    }
    const float *out = (float *)kvq_buffer_data(buffer) + 32 * 1024;
    printf("%llu and %llu tokens, output %.6f\n", (unsigned long long)batch[0].value,
           (unsigned long long)batch[1].value, out[0]);
    kvq_disconnect(&client);
    return 0;
}
