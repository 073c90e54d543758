// SPDX-License-Identifier: Apache-2.0
//
// An engine whose tensors are on a GPU. Its stream makes K, V and Q of a token, hands them to the
// daemon and goes on with the output; no host waits in between.
// cc cuda_engine.c $(pkg-config --cflags --libs kvq) -lcuda
#include <kvq.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// What we use of CUDA's driver API, as cuda.h declares it. With the runtime API it is the same: a
// cudaStream_t is a CUstream, and cudaMalloc gives such pointers.
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxSetCurrent(CUcontext context);
int cuStreamCreate(CUstream *stream, unsigned flags);
int cuStreamSynchronize(CUstream stream);
int cuStreamDestroy_v2(CUstream stream);
int cuMemAlloc_v2(CUdeviceptr *at, size_t bytes);
int cuMemFree_v2(CUdeviceptr at);
int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
int cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);

enum { LAYERS = 2, Q_HEADS = 8, KV_HEADS = 2, DIM = 128, PROMPT = 5, TOKENS = 40 };
enum { K_AT = 0, V_AT = 64 << 10, Q_AT = 128 << 10, OUT_AT = 256 << 10, BYTES = 2 << 20 };

static void check(int code)
{
    if (code) {
        fprintf(stderr, "%s\n", kvq_error_text());
        exit(1);
    }
}

static void cuda(int result)
{
    if (result) {
        fprintf(stderr, "CUDA: error %d\n", result);
        exit(1);
    }
}

// Stands for your model's kernels: K, V and Q of some tokens, made on the stream.
static void compute(CUdeviceptr at, int token, CUstream stream)
{
    static uint16_t values[OUT_AT / sizeof(uint16_t)];
    for (int i = 0; i < OUT_AT / (int)sizeof(uint16_t); i++) // bfloat16 between 1 and 2
        values[i] = (uint16_t)(0x3f80 + (i * 31 + token * 17) % 101);
    cuda(cuMemcpyHtoDAsync_v2(at, values, sizeof values, stream));
}

// A stream of the first GPU's primary context, which is current then.
static CUstream make_stream(void)
{
    CUcontext context;
    CUstream stream;
    cuda(cuInit(0));
    cuda(cuDevicePrimaryCtxRetain(&context, 0));
    cuda(cuCtxSetCurrent(context));
    cuda(cuStreamCreate(&stream, 1));
    return stream;
}

int main(void)
{
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer;
    struct kvq_gpu_info gpu;
    struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = LAYERS};
    struct kvq_session_options options = {.size = sizeof options,
                                          .layers = &layer,
                                          .n_layers = 1,
                                          .format = "oscar2",
                                          .dtype = KVQ_DTYPE_BF16};
    struct kvq_entry entry = {0};
    struct kvq_work work = {0};
    CUdeviceptr memory;
    uint32_t gpus;
    static float out[Q_HEADS * DIM];

    CUstream stream = make_stream();
    cuda(cuMemAlloc_v2(&memory, BYTES));

    check(kvq_connect(NULL, &client));
    check(kvq_daemon_gpus(client, &gpu, 1, &gpus));
    if (gpus == 0) {
        fprintf(stderr, "this kvqd has no GPU\n");
        return 1;
    }
    check(kvq_queue_open(client, &queue));
    check(kvq_queue_prepare_streams(queue));
    // Our own memory, in place. Where CUDA cannot share it: kvq_buffer_create_on, and its address.
    check(kvq_buffer_import(client, (void *)(uintptr_t)memory, BYTES, &buffer));
    work.k = kvq_tensor_make(buffer, K_AT, KV_HEADS, DIM, KVQ_DTYPE_BF16);
    work.v = kvq_tensor_make(buffer, V_AT, KV_HEADS, DIM, KVQ_DTYPE_BF16);
    work.q = kvq_tensor_make(buffer, Q_AT, Q_HEADS, DIM, KVQ_DTYPE_BF16);
    work.out = kvq_tensor_make(buffer, OUT_AT, Q_HEADS, DIM, KVQ_DTYPE_F32);
    options.place = gpu.place; // with several GPUs: the one whose context is current
    check(kvq_session_open(client, &options, &entry.session, NULL));

    for (int token = 0; token < TOKENS; token++) {
        entry.append = token == 0 ? PROMPT : 1;
        entry.queries = (uint16_t)entry.append;
        check(kvq_step_begin(queue, &entry, 1, &work.step));
        check(entry.status);
        for (work.layer = 0; work.layer < LAYERS; work.layer++) {
            compute(memory, token, stream);
            check(kvq_append_attend_on_stream(queue, &work, &entry, 1, stream));
            check(entry.status);
            // What the model does with the output goes to the same stream; it is there by then.
            cuda(cuMemcpyDtoHAsync_v2(out, memory + OUT_AT, sizeof out, stream));
        }
        check(kvq_step_end(queue, work.step, &entry, 1)); // the step's work has ended then
        check(entry.status);
        entry.position = entry.value;
    }
    cuda(cuStreamSynchronize(stream));
    static const char *const orders[] = {"nothing", "words", "events", "the host"};
    printf("%llu tokens on %s, output %.6f, streams ordered by %s\n",
           (unsigned long long)entry.position, gpu.name, (double)out[0],
           orders[kvq_queue_order(queue)]);

    kvq_buffer_close(&buffer); // before the memory is freed
    kvq_disconnect(&client);
    cuda(cuMemFree_v2(memory));
    cuda(cuStreamDestroy_v2(stream));
    return 0;
}
