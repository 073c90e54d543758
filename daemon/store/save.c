// SPDX-License-Identifier: Apache-2.0
//
// Saving a session: the poller takes hold of it, a thread of libuv's copies what may change, lets
// it go on, and writes, and the poller then notes what is saved.
#include <assert.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

// How long a save tries to take hold of its session, waiting for its turn not counted: less than
// clients wait for an answer. One that nobody waits for is tried again later. Tries become rarer,
// so that many cost little.
enum {
    RETRY_MS = 3,
    RETRY_MOST_MS = 100,
    PATIENCE_MS = 3000,
    PATIENCE_OWN_MS = 500,
};

enum { ALONG = KVQ__EVICT_AT_ONCE }; // sessions that one transaction parks
static_assert(ALONG * KVQ_MAX_SHARDS <= KVQ_MAX_STORE_SESSIONS, "each with all its shards");

// ---- Blocks that several sessions of one transaction have ----

struct same_block {
    const void *block; // kvq__save_shared
    uint64_t id;
};

static int by_block(const void *a, const void *b)
{
    const struct same_block *x = a, *y = b;
    return (x->block > y->block) - (x->block < y->block);
}

// 0: it was not put yet.
static uint64_t find_same(const struct kvq__same_blocks *same, const void *block)
{
    const struct same_block key = {block, 0};
    struct same_block *const *found = block ? tfind(&key, &same->root, by_block) : NULL;
    return found ? (*found)->id : 0;
}

// Without memory for it the block is put once more.
static void note_same(struct kvq__same_blocks *same, const void *block, uint64_t id)
{
    struct same_block *b = block ? malloc(sizeof *b) : NULL;
    if (!b)
        return;
    *b = (struct same_block){block, id};
    struct same_block **at = tsearch(b, &same->root, by_block);
    if (!at || *at != b)
        free(b);
}

void kvq__same_blocks_free(struct kvq__same_blocks *same)
{
    tdestroy(same->root, free);
    same->root = NULL;
}

// ---- On a thread of libuv's ----

static void let_go(struct kvq__mail *mail)
{
    struct kvq__task *task =
        (struct kvq__task *)((char *)mail - offsetof(struct kvq__task, copied_mail));
    kvq__save_copied(task->save);
}

// Where a session's parts are written to.
struct writing {
    struct kvq__task *task;
    struct kvq_save *out;
    struct kvq__same_blocks *same;
    uint8_t *scratch;
};

static int write_part(const struct writing *w, uint32_t shard, uint32_t i, struct kvq__part *part)
{
    struct kvq__task *t = w->task;
    struct kvq_save *out = w->out;
    const void *shared = kvq__save_shared(t->save, shard, i);
    struct kvq_place place = {part->layer, part->page, part->kind, part->from};
    int rc = KVQ_E_NO_SESSION;
    uint64_t put = find_same(w->same, shared); // what it was saved as before may be gone since
    part->id = put ? put : part->id;
    if (part->id)
        rc = kvq_save_keep(out, &place, part->id, t->text, sizeof t->text);
    t->kept_blocks += rc == 0;
    if (rc != KVQ_E_NO_SESSION && rc != KVQ_E_DAMAGED)
        return rc;
    const void *bytes = kvq__save_bytes(t->save, shard, i);
    if (!bytes) {
        snprintf(t->text, sizeof t->text, "a GPU failed while its session was read");
        return KVQ_E_SYSTEM;
    }
    t->written_blocks++;
    t->written_bytes += part->bytes;
    rc = kvq_save_put(out, &place, bytes, part->bytes, &part->id, t->text, sizeof t->text);
    if (rc == 0)
        note_same(w->same, shared, part->id);
    return rc;
}

// Whether a list has that name, not one that it begins.
static bool is_listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = strstr(list, name); at; at = strstr(at + 1, name))
        if ((at == list || at[-1] == ' ') && (at[n] == 0 || at[n] == ','))
            return true;
    return false;
}

// The formats of a session, each once, for people.
static void list_formats(const struct kvq__saved *saved, char *out, size_t room)
{
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        const char *name = saved->layers[i].format.name;
        size_t n = strlen(name);
        if (is_listed(out, name) || used + n + 3 > room)
            continue;
        used += (size_t)snprintf(out + used, room - used, "%s%s", used ? ", " : "", name);
    }
}

static int write_prefix(void *context, const uint8_t hash[KVQ_PREFIX_BYTES])
{
    const struct writing *to = context;
    return kvq_save_prefix(to->out, hash, to->task->text, sizeof to->task->text);
}

static int write_shard(struct writing *w, uint32_t shard)
{
    struct kvq__task *t = w->task;
    uint8_t *scratch = w->scratch;
    struct kvq__part *parts;
    uint32_t n;
    size_t length;
    struct kvq_arena arena;
    char formats[KVQ_FINGERPRINT_BYTES];
    const struct kvq__saved *saved = kvq__save_shard(t->save, shard, &parts, &n);
    kvq_arena_init(&arena, scratch + KVQ__SAVED_BYTES, KVQ_WIRE_ARENA);
    int rc = kvq__saved_pack(saved, &arena, scratch, &length, t->text);
    if (rc < 0)
        return rc;
    list_formats(saved, formats, sizeof formats);
    struct kvq_store_meta meta = {.space = kvq__save_namespace(t->save),
                                  .name = saved->name,
                                  .model = saved->model,
                                  .formats = formats,
                                  .shard = saved->shard,
                                  .shards = saved->shards,
                                  .tokens = saved->tokens,
                                  .saved_at = time(NULL),
                                  .version = kvq__saved_version(saved),
                                  .bytes = scratch,
                                  .n_bytes = length};
    t->tokens = saved->tokens;
    rc = kvq_save_session(w->out, &meta, t->text, sizeof t->text);
    for (uint32_t i = 0; i < n && rc == 0; i++)
        rc = write_part(w, shard, i, &parts[i]);
    return rc ? rc : kvq__save_prefixes(t->save, shard, write_prefix, w);
}

int kvq__jobs_write(struct kvq__task *t, struct kvq_save *out, struct kvq__same_blocks *same,
                    uint8_t scratch[KVQ__SCRATCH_BYTES])
{
    struct writing w = {t, out, same, scratch};
    int rc = 0;
    t->written_blocks = t->written_bytes = t->kept_blocks = 0;
    for (uint32_t i = 0; i < kvq__save_shards(t->save) && rc == 0; i++)
        rc = write_shard(&w, i);
    return rc;
}

uint64_t kvq__jobs_unsaved_bytes(const struct kvq__task *t)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < kvq__save_shards(t->save); i++) {
        struct kvq__part *parts;
        uint32_t n;
        (void)kvq__save_shard(t->save, i, &parts, &n);
        for (uint32_t k = 0; k < n; k++)
            bytes += parts[k].id ? 0 : parts[k].bytes;
    }
    return bytes;
}

// All blocks are read, also behind the first that is damaged: each is marked then.
static int read_all_back(struct kvq_store *store, const struct kvq_stored *blocks, size_t n,
                         char *text)
{
    uint64_t most = 1;
    int rc = 0;
    for (size_t i = 0; i < n; i++)
        most = blocks[i].bytes > most ? blocks[i].bytes : most;
    void *room = malloc((size_t)most);
    if (!room) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory to read back what was stored");
        return KVQ_E_NO_MEMORY;
    }
    for (size_t i = 0; i < n && (rc == 0 || rc == KVQ_E_DAMAGED); i++) {
        int one = kvq_store_read(store, &blocks[i], room, text, KVQ_TEXT_BYTES);
        rc = one ? one : rc;
    }
    free(room);
    return rc;
}

int kvq__jobs_read_back(struct kvq__task *t)
{
    struct kvq_store *store = t->jobs->store;
    struct kvq_store_session s;
    struct kvq_stored *blocks;
    size_t n;
    int rc = kvq_store_find(store, t->ns, t->name, 0, &s, t->text, sizeof t->text);
    if (rc == 0)
        rc = kvq_store_blocks(store, &s, &blocks, &n, t->text, sizeof t->text);
    if (rc < 0)
        return rc;
    rc = read_all_back(store, blocks, n, t->text);
    free(blocks);
    return rc;
}

int kvq__jobs_copy(struct kvq__task *t)
{
    int rc = kvq__save_copy(t->save);
    kvq__mailbox_post(kvq__poller_box(t->jobs->server->poller), &t->copied_mail, let_go);
    if (rc < 0)
        snprintf(t->text, sizeof t->text, "%s of session \"%s\"",
                 rc == KVQ_E_NO_MEMORY ? "no memory to copy what changes"
                                       : "a GPU failed while what changes was copied",
                 t->name);
    return rc;
}

// What the disk has spoilt is put once more.
static int read_back_parked(struct kvq__task *t)
{
    int rc = kvq__jobs_read_back(t);
    if (rc == KVQ_E_DAMAGED) {
        t->committed = false;
        kvq__batch_write(&(struct kvq__batch){.jobs = t->jobs, .tasks = &t, .n = 1});
        rc = t->rc ? t->rc : kvq__jobs_read_back(t);
    }
    return rc;
}

static void write_copied(struct kvq__task *t)
{
    struct kvq__batch *b = t->batch;
    kvq__batch_write(b);
    for (uint32_t i = 0; i < b->n; i++)
        if (b->tasks[i]->rc == 0 && b->tasks[i]->job && b->tasks[i]->name[0] == '#')
            b->tasks[i]->rc = read_back_parked(b->tasks[i]);
}

static void write_saves(struct kvq__task *t)
{
    kvq__batch_copy(t->batch);
    write_copied(t);
}

// ---- Back on the loop's ----

void kvq__jobs_tell_saved(struct kvq__task *t)
{
    char text[192];
    struct kvq__jobs *jobs = t->jobs;
    if (t->quiet || (t->job && t->rc != KVQ_E_NO_SPACE)) // of parking the core tells
        return;
    if (t->rc == KVQ_E_NO_SPACE) {
        kvq__jobs_tell(jobs, KVQ__EVENT_STORAGE_FULL, t->ns, t->name, t->text);
    } else if (t->rc == 0) {
        snprintf(text, sizeof text, "%llu tokens, %llu blocks and %llu bytes written, %llu kept",
                 (unsigned long long)t->tokens, (unsigned long long)t->written_blocks,
                 (unsigned long long)t->written_bytes, (unsigned long long)t->kept_blocks);
        kvq__jobs_tell(jobs, KVQ__EVENT_SESSION_SAVED, t->ns, t->name, text);
    } else if (t->own && t->rc != KVQ_E_QUOTA) { // which is told of by itself
        kvq__jobs_tell(jobs, KVQ__EVENT_STORAGE_FAILED, t->ns, t->name, t->text);
    }
}

static void answer_save(struct kvq__task *t)
{
    Kvq__SaveReply *r = kvq_arena_alloc(t->arena, sizeof *r);
    if (!r)
        return;
    kvq__save_reply__init(r);
    r->namespace_ = kvq_arena_text(t->arena, t->ns);
    r->name = kvq_arena_text(t->arena, t->name);
    r->tokens = t->tokens;
    r->written_blocks = t->written_blocks;
    r->written_bytes = t->written_bytes;
    r->kept_blocks = t->kept_blocks;
    r->unchanged = t->unchanged;
    r->ms = (kvq_now_ns() - t->begun) / 1000000;
    t->reply->save = r;
    t->reply->result_case = KVQ__REPLY__RESULT_SAVE;
}

// Poller's thread.
static void end_save(struct kvq__task *t)
{
    kvq__save_end(&t->save, t->rc == 0);
    if (t->own && t->rc < 0)
        t->quiet = !kvq__unsaved_failed(t->jobs->server->core, t->ns, t->name);
    if (t->job)
        kvq__park_saved(t->jobs->server->core, t->job->id, t->rc, t->text);
}

// ---- Taking hold ----
//
// What keeps a session from being taken hold of may be up to its clients, so nothing is kept
// waiting for it: neither its name nor whoever else writes. It is looked whether there is anything
// to save, without either; then the save waits for both, and if it comes too late, looks again.

// Who it is, by the handle of a client. Poller's thread.
static int find_by_handle(struct kvq__task *t, uint64_t handle)
{
    struct kvq__session_info info;
    if (!t->client) {
        snprintf(t->text, sizeof t->text,
                 "handles belong to attached clients; name the session instead");
        return KVQ_E_INVALID;
    }
    int rc = kvq__session_info(t->client, handle, &info, t->text);
    if (rc < 0)
        return rc;
    if (!info.name[0]) {
        snprintf(t->text, sizeof t->text,
                 "the session has no name, by which it could be found again; only sessions with "
                 "names are saved");
        return KVQ_E_INVALID;
    }
    snprintf(t->ns, sizeof t->ns, "%s", info.ns);
    snprintf(t->name, sizeof t->name, "%s", info.name);
    t->tokens = info.tokens;
    return 0;
}

// The same by what a request calls it, "#ID" included.
static int find_by_name(struct kvq__task *t, const Kvq__SessionRef *ref)
{
    struct kvq__session_info info;
    int rc = kvq__session_find(t->jobs->server->core, t->peer, ref->namespace_, ref->name, &info,
                               t->text);
    if (rc < 0)
        return rc;
    snprintf(t->ns, sizeof t->ns, "%s", info.ns);
    snprintf(t->name, sizeof t->name, "%s", info.name[0] ? info.name : ref->name);
    t->tokens = info.tokens;
    return 0;
}

static void try_save(struct kvq__task *t, bool looks)
{
    bool parks = t->job != NULL;
    struct kvq__save_spec spec = {.ns = t->ns,
                                  .name = parks ? t->job->session : t->name,
                                  .again = t->again,
                                  .unnamed = parks,
                                  .parks = parks,
                                  .looks = looks};
    t->rc = kvq__save_begin(t->jobs->server->core, t->peer, &spec, &t->save, t->text);
}

// Poller's thread.
static void look_at_saved(struct kvq__task *t)
{
    const Kvq__SaveSession *ask = t->request ? t->request->save_session : NULL;
    t->rc = 0;
    if (ask && !t->name[0])
        t->rc = ask->which_case == KVQ__SAVE_SESSION__WHICH_REF ? find_by_name(t, ask->ref)
                                                                : find_by_handle(t, ask->handle);
    if (t->rc == 0)
        try_save(t, true);
}

// Poller's thread, with the name held alone, and in its turn.
static void take_hold_of_session(struct kvq__task *t)
{
    try_save(t, false);
}

// What is written in one turn: a save; or the parking of a session, and with it of others of its
// namespace that wait for their turns right behind it. The core has many evicted side by side, and
// of small ones the end of a transaction takes longer than all the rest.
struct holding {
    struct kvq__batch batch; // first
    struct kvq__task *tasks[ALONG];
    uint32_t at;    // the next one to be taken hold of
    uint64_t bytes; // of those before
};

static bool parks(const struct kvq__task *t)
{
    return t->job && t->job->kind == KVQ__JOB_SAVE;
}

// Poller's thread, with the names held alone, and in the turn of the first.
static bool take_hold_of_next(struct kvq__task *first)
{
    struct holding *h = (struct holding *)first->batch;
    const struct kvq__task *last = h->tasks[h->at - 1];
    h->bytes += last->save ? kvq__jobs_unsaved_bytes(last) : 0;
    if (h->bytes >= KVQ__BATCH_BYTES || h->at == h->batch.n)
        return true;
    take_hold_of_session(h->tasks[h->at++]);
    return false;
}

// Those that cannot be taken hold of now wait for their own turn.
static void take_along(struct holding *h)
{
    uint32_t n = 1;
    for (uint32_t i = 1; i < h->at; i++) {
        struct kvq__task *t = h->tasks[i];
        if (!t->save) {
            t->rc = KVQ__SAVE_THERE_IS;
            continue;
        }
        kvq__task_go_along(t);
        h->tasks[n++] = t;
    }
    h->batch.n = n;
}

// In its turn. Waits.
static void take_hold_of_sessions(struct kvq__task *first, struct holding *h)
{
    struct kvq__write_turn *turn = NULL;
    *h = (struct holding){.batch = {.jobs = first->jobs, .tasks = h->tasks, .n = 1}, .at = 1};
    h->tasks[0] = first;
    first->batch = &h->batch;
    kvq__task_at_poller(first, take_hold_of_session);
    if (!first->save || !parks(first))
        return;
    while (h->batch.n < ALONG && (turn = kvq__turn_after(first->turns, first->ns, turn)) &&
           parks(kvq__task_of_turn(turn)))
        h->tasks[h->batch.n++] = kvq__task_of_turn(turn);
    if (h->batch.n > 1)
        kvq__task_at_poller_in_pieces(first, take_hold_of_next);
    take_along(h);
}

// Until there is a save, nothing to be saved, or no more patience.
static void take_hold(struct kvq__task *t, struct holding *h)
{
    uint64_t patience = t->own ? PATIENCE_OWN_MS : PATIENCE_MS, wait = RETRY_MS, waited = 0;
    for (;;) {
        kvq__task_at_poller(t, look_at_saved);
        if (t->rc == KVQ__SAVE_THERE_IS) {
            kvq__task_take_name(t, KVQ__HOLD_ALONE);
            kvq__task_take_turn(t);
            if (t->along)
                return;
            take_hold_of_sessions(t, h);
        }
        if (t->rc != KVQ__SAVE_WAITS)
            return;
        if (waited >= patience)
            break;
        kvq__task_step_aside(t);
        t->set_aside = true;
        kvq__task_sleep(t, wait);
        t->set_aside = false;
        waited += wait;
        wait = 2 * wait < RETRY_MOST_MS ? 2 * wait : RETRY_MOST_MS;
    }
    snprintf(t->text, sizeof t->text,
             "session \"%s\" was changed, packed or moved for %g s without a break, or its "
             "shards stand at different counts; try again",
             t->name, (double)patience / 1000.0);
    t->rc = KVQ_E_BUSY;
}

// ---- A save ----

// Bytes of those that the full disk has refused, which are to be written once more then.
static uint64_t forget_full_disk(const struct kvq__batch *b, bool again)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        struct kvq__task *t = b->tasks[i];
        if (t->rc != KVQ_E_NO_SPACE)
            continue;
        bytes += t->needed + 1;
        t->rc = again ? 0 : t->rc;
    }
    return bytes;
}

// Waits.
static void write_batch(struct kvq__task *t)
{
    struct kvq__batch *b = t->batch;
    kvq__task_at_work(t, write_saves);
    uint64_t bytes = forget_full_disk(b, false);
    if (bytes && kvq__transfers_make_room(t, bytes)) {
        forget_full_disk(b, true);
        b->full = false;
        kvq__task_at_work(t, write_copied);
    }
    for (uint32_t i = 1; i < b->n; i++)
        kvq__task_wake(b->tasks[i]);
}

void kvq__jobs_save(struct kvq__task *t)
{
    struct holding h;
    t->begun = kvq_now_ns();
    take_hold(t, &h);
    t->unchanged = t->rc == 0 && !t->save;
    if (t->save && !t->along)
        write_batch(t);
    if (t->save && t->rc == 0)
        kvq__histogram_add(&t->jobs->times.of[KVQ__TIME_SAVE], kvq_now_ns() - t->begun);
    if (t->save || (t->own && t->rc < 0))
        kvq__jobs_note_end(t->jobs, KVQ__TIME_SAVE, t->rc);
    if (t->save || t->job || (t->own && t->rc < 0)) {
        kvq__task_at_poller(t, end_save);
        kvq__jobs_tell_saved(t);
    }
    if (t->rc == 0 && t->reply)
        answer_save(t);
}
