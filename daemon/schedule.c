// SPDX-License-Identifier: Apache-2.0
//
// Surplus round robin (Adiseshu, Parulkar, Varghese, 1996): a client is served while its deficit
// is positive; what its items really took is charged when it is known, which may leave a debt
// for later rounds. Plain deficit round robin would need the cost of an item before it runs.
#include "daemon/schedule.h"

#include <assert.h>

#include "proto/sync.h"

void kvq__schedule_init(struct kvq__schedule *schedule)
{
    for (int c = 0; c < KVQ__CLASSES; c++) {
        TAILQ_INIT(&schedule->shares[c]);
        schedule->n_shares[c] = 0;
    }
    schedule->picks = 0;
}

void kvq__share_init(struct kvq__share *share)
{
    share->cost_ns = share->charged_ns = 0;
    share->deficit_ns = 0;
    for (int c = 0; c < KVQ__CLASSES; c++)
        TAILQ_INIT(&share->work[c]);
}

enum kvq__class kvq__class_of(const struct kvq_request *request,
                              const struct kvq_entry_wire *entries)
{
    for (uint32_t i = 0; i < request->count; i++)
        if (entries[i].append > KVQ__DECODE_TOKENS || entries[i].queries > KVQ__DECODE_TOKENS)
            return KVQ__PREFILL;
    return KVQ__DECODE;
}

void kvq__schedule_add(struct kvq__schedule *schedule, struct kvq__work *work)
{
    struct kvq__share *share = work->share;
    assert(work->n_items > 0);
    work->picked = 0;
    work->done = 0;
    if (TAILQ_EMPTY(&share->work[work->class])) {
        TAILQ_INSERT_TAIL(&schedule->shares[work->class], share, link[work->class]);
        schedule->n_shares[work->class]++;
    }
    TAILQ_INSERT_TAIL(&share->work[work->class], work, link);
}

static void charge(struct kvq__share *share)
{
    uint64_t cost = kvq_long_load(&share->cost_ns);
    share->deficit_ns -= (int64_t)(cost - share->charged_ns);
    share->charged_ns = cost;
}

// Moves the list on to a share with a positive deficit, giving a quantum to those passed over.
static struct kvq__share *serve(struct kvq__schedule *schedule, enum kvq__class class)
{
    struct kvq__share_list *list = &schedule->shares[class];
    struct kvq__share *share;
    int64_t least_debt = INT64_MIN;
    for (uint32_t i = 0; i < schedule->n_shares[class]; i++) {
        share = TAILQ_FIRST(list);
        charge(share);
        if (share->deficit_ns > 0)
            return share;
        share->deficit_ns += KVQ__QUANTUM_NS;
        if (share->deficit_ns > least_debt)
            least_debt = share->deficit_ns;
        TAILQ_REMOVE(list, share, link[class]);
        TAILQ_INSERT_TAIL(list, share, link[class]);
    }
    // All may be so deep in debt that this round helped none: forgive what many rounds would.
    if (least_debt <= 0)
        TAILQ_FOREACH (share, list, link[class])
            share->deficit_ns += 1 - least_debt;
    TAILQ_FOREACH (share, list, link[class])
        if (share->deficit_ns > 0)
            break;
    if (share) {
        TAILQ_REMOVE(list, share, link[class]);
        TAILQ_INSERT_HEAD(list, share, link[class]);
    }
    return share;
}

static struct kvq__work *pick_class(struct kvq__schedule *schedule, enum kvq__class class,
                                    uint32_t *item)
{
    struct kvq__share *share = serve(schedule, class);
    if (!share)
        return NULL;
    struct kvq__work *work = TAILQ_FIRST(&share->work[class]);
    *item = work->picked++;
    TAILQ_REMOVE(&share->work[class], work, link);
    if (work->picked < work->n_items)
        TAILQ_INSERT_TAIL(&share->work[class], work, link);
    if (TAILQ_EMPTY(&share->work[class])) {
        TAILQ_REMOVE(&schedule->shares[class], share, link[class]);
        schedule->n_shares[class]--;
        if (share->deficit_ns > 0)
            share->deficit_ns = 0; // nobody saves up time while idle
    }
    return work;
}

struct kvq__work *kvq__schedule_pick(struct kvq__schedule *schedule, uint32_t *item)
{
    enum kvq__class first = ++schedule->picks % KVQ__PREFILL_SHARE ? KVQ__DECODE : KVQ__PREFILL;
    struct kvq__work *work = pick_class(schedule, first, item);
    return work ? work
                : pick_class(schedule, first == KVQ__DECODE ? KVQ__PREFILL : KVQ__DECODE, item);
}

bool kvq__schedule_empty(const struct kvq__schedule *schedule)
{
    return schedule->n_shares[KVQ__DECODE] == 0 && schedule->n_shares[KVQ__PREFILL] == 0;
}
