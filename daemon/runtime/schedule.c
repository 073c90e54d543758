// SPDX-License-Identifier: Apache-2.0
//
// Surplus round robin (Adiseshu, Parulkar, Varghese, 1996): a client is served while its deficit
// is positive; what its items really took is charged when it is known, which may leave a debt
// for later rounds. Plain deficit round robin would need the cost of an item before it runs.
#include "daemon/runtime/schedule.h"

#include <assert.h>

#include "proto/sync.h"

void kvq__schedule_init(struct kvq__schedule *schedule)
{
    for (int c = 0; c < KVQ__URGENCIES; c++) {
        TAILQ_INIT(&schedule->shares[c]);
        schedule->n_shares[c] = 0;
    }
    schedule->picks = 0;
}

void kvq__share_init(struct kvq__share *share)
{
    share->cost_ns = share->charged_ns = 0;
    share->deficit_ns = 0;
    for (int c = 0; c < KVQ__URGENCIES; c++)
        TAILQ_INIT(&share->work[c]);
}

enum kvq__urgency kvq__urgency_of(const struct kvq_request *request,
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
    assert(share && work->urgency < KVQ__URGENCIES);
    assert(work->n_items > 0);
    work->picked = 0;
    work->done = 0;
    if (TAILQ_EMPTY(&share->work[work->urgency])) {
        TAILQ_INSERT_TAIL(&schedule->shares[work->urgency], share, link[work->urgency]);
        schedule->n_shares[work->urgency]++;
    }
    TAILQ_INSERT_TAIL(&share->work[work->urgency], work, link);
}

static void charge(struct kvq__share *share)
{
    uint64_t cost = kvq_long_load(&share->cost_ns);
    assert(cost >= share->charged_ns);
    share->deficit_ns -= (int64_t)(cost - share->charged_ns);
    share->charged_ns = cost;
}

// Moves the list on to a share with a positive deficit, giving a quantum to those passed over.
static struct kvq__share *serve_share(struct kvq__schedule *schedule, enum kvq__urgency urgency)
{
    struct kvq__share_list *list = &schedule->shares[urgency];
    struct kvq__share *share;
    int64_t least_debt = INT64_MIN;
    for (uint32_t i = 0; i < schedule->n_shares[urgency]; i++) {
        share = TAILQ_FIRST(list);
        assert(share && !TAILQ_EMPTY(&share->work[urgency]));
        charge(share);
        if (share->deficit_ns > 0)
            return share;
        share->deficit_ns += KVQ__QUANTUM_NS;
        if (share->deficit_ns > least_debt)
            least_debt = share->deficit_ns;
        TAILQ_REMOVE(list, share, link[urgency]);
        TAILQ_INSERT_TAIL(list, share, link[urgency]);
    }
    // All may be so deep in debt that this round helped none: forgive what many rounds would.
    if (least_debt <= 0)
        TAILQ_FOREACH (share, list, link[urgency])
            share->deficit_ns += 1 - least_debt;
    TAILQ_FOREACH (share, list, link[urgency])
        if (share->deficit_ns > 0)
            break;
    if (share) {
        TAILQ_REMOVE(list, share, link[urgency]);
        TAILQ_INSERT_HEAD(list, share, link[urgency]);
    }
    return share;
}

static struct kvq__work *pick_of(struct kvq__schedule *schedule, enum kvq__urgency urgency,
                                 uint32_t *item)
{
    struct kvq__share *share = serve_share(schedule, urgency);
    if (!share)
        return NULL;
    struct kvq__work *work = TAILQ_FIRST(&share->work[urgency]);
    assert(work && work->picked < work->n_items);
    *item = work->picked++;
    TAILQ_REMOVE(&share->work[urgency], work, link);
    if (work->picked < work->n_items)
        TAILQ_INSERT_TAIL(&share->work[urgency], work, link);
    if (TAILQ_EMPTY(&share->work[urgency])) {
        TAILQ_REMOVE(&schedule->shares[urgency], share, link[urgency]);
        assert(schedule->n_shares[urgency] > 0);
        schedule->n_shares[urgency]--;
    }
    return work;
}

struct kvq__work *kvq__schedule_pick(struct kvq__schedule *schedule, uint32_t *item)
{
    enum kvq__urgency first = ++schedule->picks % KVQ__PREFILL_SHARE ? KVQ__DECODE : KVQ__PREFILL;
    struct kvq__work *work = pick_of(schedule, first, item);
    return work ? work : pick_of(schedule, first == KVQ__DECODE ? KVQ__PREFILL : KVQ__DECODE, item);
}

bool kvq__schedule_empty(const struct kvq__schedule *schedule)
{
    assert(TAILQ_EMPTY(&schedule->shares[KVQ__DECODE]) == (schedule->n_shares[KVQ__DECODE] == 0));
    return schedule->n_shares[KVQ__DECODE] == 0 && schedule->n_shares[KVQ__PREFILL] == 0;
}

bool kvq__schedule_only(const struct kvq__schedule *schedule, const struct kvq__work *work)
{
    const struct kvq__work *first;
    assert(work->share && work->urgency < KVQ__URGENCIES);
    if (schedule->n_shares[KVQ__DECODE] + schedule->n_shares[KVQ__PREFILL] != 1)
        return kvq__schedule_empty(schedule);
    first = TAILQ_FIRST(&work->share->work[work->urgency]);
    return first == work && !TAILQ_NEXT(first, link);
}
