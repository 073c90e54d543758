// SPDX-License-Identifier: Apache-2.0
//
// The same engine as minimal.c, but attention runs here, over the daemon's memory: one request for
// each step instead of one for each layer, and the same output to the bit.
// cc in_context.c $(pkg-config --cflags --libs kvq)
#include <kvq.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, DIM = 128, LAYER_FLOATS = 1 << 15 };

static void check(int code)
{
    if (code) {
        fprintf(stderr, "%s\n", kvq_error_text());
        exit(1);
    }
}

// Stands for your model: K and V of every new token, then Q, of one layer.
static void compute(float *values, int token)
{
    for (int i = 0; i < LAYER_FLOATS; i++)
        values[i] = (float)((i * 31 + token * 17) % 101 - 50) / 50;
}

int main(void)
{
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer;
    kvq_local *local;
    struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = LAYERS};
    struct kvq_session_options options = {
        .size = sizeof options,
        .layers = &layer,
        .n_layers = 1,
        .format = "kvq2",
        .place = "host"}; // else a daemon with GPUs would choose one of them
    struct kvq_entry batch[BATCH] = {0};
    const uint64_t bytes = LAYER_FLOATS * sizeof(float), out_at = LAYERS * bytes;
    check(kvq_connect(NULL, &client));
    check(kvq_queue_open(client, &queue));
    check(kvq_buffer_create(client, (LAYERS + 1) * bytes, &buffer));
    check(kvq_local_open(queue, NULL, &local));
    if (kvq_local_why(local)) // the results are the same
        fprintf(stderr, "attention goes through the daemon: %s\n", kvq_local_why(local));
    for (int s = 0; s < BATCH; s++) {
        check(kvq_session_open(client, &options, &batch[s].session, NULL));
        check(kvq_local_add(local, batch[s].session));
    }

    for (int token = 0; token < 300; token++) {
        for (uint32_t s = 0, row = 0; s < BATCH; row += batch[s++].append) {
            batch[s].append = token == 0 ? 5 + s : 1;
            batch[s].queries = (uint16_t)batch[s].append;
            batch[s].row = batch[s].q_row = row;
        }
        check(kvq_local_begin(local, batch, BATCH));
        for (int s = 0; s < BATCH; s++)
            check(batch[s].status);
        for (uint32_t i = 0; i < LAYERS; i++) {
            // K and V of each layer have a place of their own: they stay until the step's end.
            const uint64_t at = i * bytes;
            struct kvq_work work = {.layer = i};
            work.k = kvq_tensor_make(buffer, at, KV_HEADS, DIM, KVQ_DTYPE_F32);
            work.v = kvq_tensor_make(buffer, at + 16 * 1024, KV_HEADS, DIM, KVQ_DTYPE_F32);
            work.q = kvq_tensor_make(buffer, at + 32 * 1024, Q_HEADS, DIM, KVQ_DTYPE_F32);
            work.out = kvq_tensor_make(buffer, out_at, Q_HEADS, DIM, KVQ_DTYPE_F32);
            compute((float *)kvq_buffer_data(buffer) + i * LAYER_FLOATS, token);
            check(kvq_local_attend(local, &work, batch, BATCH));
            for (int s = 0; s < BATCH; s++)
                check(batch[s].status);
        }
        check(kvq_local_end(local, NULL, batch, BATCH));
        for (int s = 0; s < BATCH; s++) {
            check(batch[s].status);
            batch[s].position = batch[s].value;
        }
    }
    const float *out = (float *)kvq_buffer_data(buffer) + out_at / sizeof(float);
    printf("%llu and %llu tokens, output %.6f\n", (unsigned long long)batch[0].value,
           (unsigned long long)batch[1].value, (double)out[0]);
    kvq_local_close(&local);
    kvq_disconnect(&client);
    return 0;
}
