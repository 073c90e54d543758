// SPDX-License-Identifier: Apache-2.0
//
// Sessions that are written in one transaction. One that cannot be written is taken out of it;
// where the disk or a limit refuses all, halves are tried, down to single sessions.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/internal.h"

static bool is_to_write(const struct kvq__task *t)
{
    return t->rc == 0 && t->save && !t->committed;
}

// Sessions [from, to) in one transaction, without those that cannot be saved themselves. 0, or why
// none of them is.
static int write_some(struct kvq__batch *b, uint32_t from, uint32_t to, uint8_t *scratch,
                      char *text)
{
    struct kvq_save *out = NULL;
    struct kvq__same_blocks same = {0};
    int rc = kvq_save_begin(b->jobs->store, &out, text, KVQ_TEXT_BYTES);
    for (uint32_t i = from; i < to && rc == 0; i++) {
        struct kvq__task *t = b->tasks[i];
        uint32_t before = kvq_save_count(out);
        if (!is_to_write(t))
            continue;
        int failed = kvq__jobs_write(t, out, &same, scratch);
        if (failed && kvq_save_cut(out, before)) {
            t->rc = failed;
        } else if (failed) {
            snprintf(text, KVQ_TEXT_BYTES, "%s", t->text);
            rc = failed;
        }
    }
    if (rc == 0 && kvq_save_count(out) > 0) {
        rc = kvq_save_commit(&out, text, KVQ_TEXT_BYTES);
        b->transactions += rc == 0;
    }
    for (uint32_t i = from; i < to && rc == 0; i++)
        b->tasks[i]->committed |= is_to_write(b->tasks[i]);
    kvq_save_abort(&out);
    kvq__same_blocks_free(&same);
    return rc;
}

static uint64_t bytes_to_write(const struct kvq__batch *b, uint32_t from, uint32_t to)
{
    uint64_t bytes = 0;
    for (uint32_t i = from; i < to; i++)
        bytes += is_to_write(b->tasks[i]) ? b->tasks[i]->needed : 0;
    return bytes;
}

// Fewer sessions at a time may do.
static bool is_about_some(int rc)
{
    return rc == KVQ_E_NO_SPACE || rc == KVQ_E_QUOTA || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_LIMIT;
}

// Whether a limit of a namespace was too low for all, or for some.
static bool is_at_limit(const struct kvq__batch *b, uint32_t from, uint32_t to, int rc)
{
    bool is = rc == KVQ_E_QUOTA;
    for (uint32_t i = from; i < to; i++)
        is |= b->tasks[i]->save && b->tasks[i]->rc == KVQ_E_QUOTA;
    return is;
}

// What an earlier run has left of those that were refused at a limit goes. Whether there was any.
static bool sweep_refused(const struct kvq__batch *b, uint32_t from, uint32_t to)
{
    const char *last = "";
    uint32_t n = 0;
    for (uint32_t i = from; i < to; i++) {
        const struct kvq__task *t = b->tasks[i];
        if (!t->save || (t->rc && t->rc != KVQ_E_QUOTA) || strcmp(t->ns, last) == 0)
            continue;
        n += kvq__jobs_sweep_all(b->jobs, t->ns);
        last = t->ns;
    }
    return n > 0;
}

// Whoever the limit was too low for may fit without the others.
static void forget_refusals(struct kvq__batch *b, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++)
        if (b->tasks[i]->save && b->tasks[i]->rc == KVQ_E_QUOTA)
            b->tasks[i]->rc = 0;
}

static void refuse_all(struct kvq__batch *b, uint32_t from, uint32_t to, int rc, const char *text)
{
    assert(rc < 0);
    for (uint32_t i = from; i < to; i++)
        if (is_to_write(b->tasks[i])) {
            b->tasks[i]->rc = rc;
            snprintf(b->tasks[i]->text, KVQ_TEXT_BYTES, "%s", text);
        }
}

// write_some, and if that fails for each half: what stands in the way of some is not in the way of
// others.
static void write_halves(struct kvq__batch *b, uint32_t from, uint32_t to, uint8_t *scratch)
{
    char text[KVQ_TEXT_BYTES];
    uint64_t bytes = bytes_to_write(b, from, to);
    int rc = write_some(b, from, to, scratch, text);
    if (is_at_limit(b, from, to, rc) && sweep_refused(b, from, to)) {
        forget_refusals(b, from, to);
        rc = write_some(b, from, to, scratch, text);
    }
    if (rc == KVQ_E_NO_SPACE && !b->full) {
        b->full = !kvq__jobs_make_room(b->jobs, bytes);
        rc = b->full ? rc : write_some(b, from, to, scratch, text);
    }
    if (rc == 0)
        return;
    if (to - from > 1 && is_about_some(rc)) {
        uint32_t middle = from + (to - from) / 2;
        forget_refusals(b, from, to);
        write_halves(b, from, middle, scratch);
        write_halves(b, middle, to, scratch);
        return;
    }
    refuse_all(b, from, to, rc, text);
}

void kvq__batch_copy(struct kvq__batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        struct kvq__task *t = b->tasks[i];
        if (!is_to_write(t))
            continue;
        t->rc = kvq__jobs_copy(t);
        t->needed = kvq__jobs_unsaved_bytes(t);
    }
}

void kvq__batch_write(struct kvq__batch *b)
{
    uint8_t *scratch = malloc(KVQ__SCRATCH_BYTES);
    if (!scratch)
        refuse_all(b, 0, b->n, KVQ_E_NO_MEMORY, "no memory to save sessions");
    else if (b->n > 0)
        write_halves(b, 0, b->n, scratch);
    free(scratch);
}
