// SPDX-License-Identifier: Apache-2.0
//
// See refill.h.
#include "daemon/runtime/refill.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/extents.h"
#include "daemon/log/log.h"
#include "daemon/runtime/descriptors.h"
#include "kernels/thread.h"

// Of one GPU.
struct filler {
    struct kvq__gpu *gpu;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool asked, stop;
    struct kvq_log_budget log_budget;
};

struct kvq__refill {
    struct filler fillers[KVQ_MAX_GPUS];
    uint32_t n; // that run
};

static void *filler_main(void *context)
{
    struct filler *f = context;
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        f->asked = false;
        pthread_mutex_unlock(&f->lock);
        while (kvq__reserve_work(f->gpu))
            continue;
        pthread_mutex_lock(&f->lock);
        while (!f->asked && !f->stop)
            pthread_cond_wait(&f->wake, &f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

// The poller's thread.
static void ask_for_refill(void *context)
{
    struct filler *f = context;
    pthread_mutex_lock(&f->lock);
    f->asked = true;
    pthread_cond_signal(&f->wake);
    pthread_mutex_unlock(&f->lock);
}

// An extent is a descriptor for as long as it is there. Some are kept for clients and libraries, as
// for extents on the host.
static bool has_descriptor(void *context)
{
    struct filler *f = context;
    if (kvq__descriptors_free() > kvq__descriptors_kept())
        return true;
    pthread_mutex_lock(&f->lock);
    kvq__log_client(&f->log_budget, KVQ_LOG_ERROR, "no_descriptors",
                    "what=extent place=%s free=%u limit=%u remedy=\"raise LimitNOFILE=\"",
                    kvq__gpu_uuid_text(f->gpu), kvq__descriptors_free(), kvq__descriptors_limit());
    pthread_mutex_unlock(&f->lock);
    return false;
}

static int start_filler(struct filler *f)
{
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->wake, NULL);
    int error = kvq_thread_start(&f->thread, filler_main, f);
    if (error) {
        pthread_cond_destroy(&f->wake);
        pthread_mutex_destroy(&f->lock);
    }
    return error;
}

int kvq__refill_open(struct kvq__gpus *gpus, uint64_t extent_bytes, struct kvq__refill **out,
                     char *text)
{
    struct kvq__refill *refill = calloc(1, sizeof *refill);
    int error = refill ? 0 : ENOMEM;
    assert(kvq__gpus_count(gpus) <= KVQ_MAX_GPUS && extent_bytes > 0);
    for (uint32_t i = 0; i < kvq__gpus_count(gpus) && !error; i++) {
        struct filler *f = &refill->fillers[i];
        struct kvq__reserve_config config = {.extent_bytes = extent_bytes,
                                             .mark = KVQ__RESERVE,
                                             .ask = ask_for_refill,
                                             .may_make = has_descriptor,
                                             .context = f};
        f->gpu = kvq__gpus_get(gpus, i);
        error = kvq__reserve_open(f->gpu, &config) ? ENOMEM : start_filler(f);
        refill->n += !error;
    }
    if (error) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot start what makes memory of GPUs ready: %s",
                 strerror(error));
        kvq__refill_close(&refill);
    }
    *out = refill;
    return error == ENOMEM ? KVQ_E_NO_MEMORY : error ? KVQ_E_SYSTEM : 0;
}

void kvq__refill_close(struct kvq__refill **pointer)
{
    struct kvq__refill *refill = *pointer;
    if (!refill)
        return;
    assert(refill->n <= KVQ_MAX_GPUS);
    *pointer = NULL;
    for (uint32_t i = 0; i < refill->n; i++) {
        struct filler *f = &refill->fillers[i];
        pthread_mutex_lock(&f->lock);
        f->stop = true;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
        pthread_join(f->thread, NULL);
        pthread_cond_destroy(&f->wake);
        pthread_mutex_destroy(&f->lock);
    }
    free(refill);
}
