// SPDX-License-Identifier: Apache-2.0
//
// The seeded simulation of the whole core. See sim.h.
//
//     sim [FIRST_SEED [COUNT [EVENTS [trace]]]]
//
// Every run of one seed is the same; a failure prints it.
#include "tests/core/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/gpu.h"
#include "proto/ring.h"

enum { DEFAULT_EVENTS = 600, MIB = 1 << 20 };

// ---- Traces ----

void sim_trace(struct sim *sim, uint64_t value)
{
    uint64_t x = (sim->trace ^ value) * 0x9e3779b97f4a7c15u;
    sim->trace = x ^ x >> 29;
}

void sim_trace_bytes(struct sim *sim, const void *bytes, size_t n)
{
    uint64_t value;
    for (size_t at = 0; at < n; at += sizeof value) {
        value = 0;
        memcpy(&value, (const uint8_t *)bytes + at, n - at < sizeof value ? n - at : sizeof value);
        sim_trace(sim, value);
    }
}

static bool tell; // the trace after each event

// What the seed has decided so far, and what the core has by now.
static void trace_event(struct sim *sim)
{
    const struct kvq__core *core = sim->kit.core;
    sim_trace(sim, sim->kit.random);
    sim_trace(sim, sim->kit.now);
    sim_trace(sim, core->n_sessions);
    for (uint32_t i = 0; i < core->n_pools; i++)
        sim_trace(sim, core->pools[i].used_bytes);
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].used && sim->tracks[i].alive)
            sim_trace(sim, sim->tracks[i].id << 32 | sim->tracks[i].model.tokens);
    for (int i = 0; i < KVQ__EVENTS; i++)
        sim_trace(sim, sim->kit.events[i]);
    if (tell)
        fprintf(stderr, "event %u: %016llx\n", sim->events, (unsigned long long)sim->trace);
    sim->events++;
}

// ---- Tracks against the core ----

static bool is_forking(const struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        if (sim->actors[i].phase != IDLE && sim->actors[i].header.op == KVQ_OP_FORK)
            return true;
    return false;
}

static void check_tracks(const struct sim *sim)
{
    uint32_t alive = 0;
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        const struct track *t = &sim->tracks[i];
        if (!t->used || !t->alive)
            continue;
        const struct kvq__session *s = find_session(sim, t->id);
        MUST(s);
        MUST(s->tokens == t->model.tokens && s->floor == t->model.floor);
        MUST(s->in_step.committing || kvq__in_step(s) == (t->stepper || t->prepared));
        MUST(s->in_step.prepared == t->prepared);
        MUST(s->in_step.committing || s->in_step.tokens == t->step_tokens);
        MUST((s->writer != NULL) == (t->writer != NULL) && s->readers == t->readers);
        for (uint32_t l = 0; l < MODEL_LAYERS; l++)
            MUST(!kvq__layer_owns(s, l) || s->layers[l].base == t->model.layers[l].base);
        alive++;
    }
    alive += keep_reads_prefix(sim);
    MUST(alive == sim->kit.core->n_sessions || is_forking(sim));
}

// Forgets dead tracks that no request under way refers to.
static void collect_tracks(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        struct track *t = &sim->tracks[i];
        bool needed = t->alive;
        for (uint32_t j = 0; j < SIM_ACTORS; j++)
            for (uint32_t k = 0; sim->actors[j].phase != IDLE && k < SIM_BATCH; k++)
                needed = needed || sim->actors[j].parts[k].track == t ||
                         sim->actors[j].parts[k].forked == t;
        if (!t->used || needed)
            continue;
        model_free(&t->model);
        t->used = false;
    }
}

// ---- Control: opening and closing ----

static struct hold *free_hold(struct actor *a)
{
    for (uint32_t i = 0; i < SIM_HANDLES; i++)
        if (!a->holds[i].used)
            return &a->holds[i];
    return NULL;
}

static struct track *named_track(struct sim *sim, const char *name, uint32_t shard)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].used && sim->tracks[i].alive && sim->tracks[i].shard == shard &&
            strcmp(sim->tracks[i].name, name) == 0)
            return &sim->tracks[i];
    return NULL;
}

// A shard that has ended its step needs nobody for it any more.
static void writer_goes(struct sim *sim, struct track *t)
{
    if (!t->prepared)
        track_leave(sim, t);
    t->writer = NULL;
    t->untold = false;
}

static void take_over(struct sim *sim, struct track *t)
{
    struct actor *old = t->writer;
    for (uint32_t i = 0; i < SIM_HANDLES; i++) {
        struct hold *h = &old->holds[i];
        if (h->used && h->track == t && !h->read_only) {
            h->taken = true;
            h->track = NULL;
        }
    }
    writer_goes(sim, t);
}

static int predict_open(const struct track *t, uint32_t flags)
{
    if (!t)
        return flags & KVQ__OPEN_READ_ONLY ? KVQ_E_NO_SESSION : 0;
    if (!(flags & KVQ__OPEN_READ_ONLY) && t->writer && !(flags & KVQ__OPEN_TAKE_OVER))
        return KVQ_E_BUSY;
    return 0;
}

static const char *first_gpu(const struct sim *sim)
{
    return kvq__pool_name(&sim->kit.core->pools[1]);
}

// Whether all formats of a variant can share prefixes.
static bool can_share(uint32_t variant)
{
    return variant < 4;
}

// Ids of a story, as they stand in the actor's buffer.
static void ask_prefix(struct sim *sim, struct actor *a, uint32_t story,
                       struct kvq__session_spec *spec)
{
    uint32_t n = kit_below(&sim->kit, SIM_MAX_TOKENS);
    if (kit_chance(&sim->kit, 30))
        return;
    for (uint32_t t = 0; t < n; t++)
        actor_ids(a)[t] = story_id(story, t);
    spec->prefix = (struct kvq__prefix_spec){
        .buffer = a->member.buffer,
        .offset = (uint64_t)((const uint8_t *)actor_ids(a) - a->member.memory),
        .tokens = n};
}

static void begin_story(struct sim *sim, struct track *t, uint32_t story, uint64_t tokens,
                        uint64_t most)
{
    t->story = story;
    MUST(tokens % KVQ_BLOCK_TOKENS == 0 && tokens <= most);
    sim->prefixes += tokens > 0;
    sim->shared += tokens;
    ids_begin(t, tokens);
}

static void opened(struct sim *sim, struct actor *a, struct hold *h, struct track *t,
                   const struct kvq__session_spec *spec, const struct kvq__session_info *info,
                   uint32_t story)
{
    bool read_only = spec->flags & KVQ__OPEN_READ_ONLY;
    MUST(info->created == !t && info->read_only == read_only);
    if (!t) {
        t = track_new(sim, spec->name[0] != 0, (uint32_t)spec->prompt_tokens, spec->max_rollback);
        MUST(t);
        snprintf(t->name, sizeof t->name, "%s", spec->name);
        t->shard = spec->shard;
        t->shards = spec->shards ? spec->shards : 1;
        t->on_gpu = strcmp(info->place, "host") != 0;
        t->streams = t->on_gpu && strcmp(info->place, first_gpu(sim)) == 0;
        t->id = info->id;
        t->alive = true;
        begin_story(sim, t, story, info->tokens, spec->prefix.tokens);
    }
    if (!read_only && t->writer)
        take_over(sim, t);
    *h = (struct hold){.used = true, .read_only = read_only, .track = t, .handle = info->handle};
    if (read_only)
        t->readers++;
    else
        t->writer = a;
    if (!read_only)
        t->undone_by = 0;
    if (kit_chance(&sim->kit, 30))
        table_open(sim, a, h);
}

// What both shards of a session have alike.
static void agree(const struct track *other, struct kvq__session_spec *spec)
{
    if (!other)
        return;
    spec->prompt_tokens = other->variant;
    spec->max_rollback = other->model.max_rollback;
}

static void open_session(struct sim *sim, struct actor *a)
{
    static const uint32_t rollbacks[] = {0, 0, 3, 20, 150};
    struct kvq__layer_row rows[MODEL_LAYERS];
    struct kvq__session_info info;
    char text[KVQ_TEXT_BYTES] = "", name[32] = "";
    struct hold *h = free_hold(a);
    if (!h)
        return;
    bool sharded = kit_chance(&sim->kit, 35);
    uint32_t shard = sharded ? kit_below(&sim->kit, 2) : 0;
    if (sharded)
        snprintf(name, sizeof name, "group");
    else if (kit_chance(&sim->kit, 60))
        snprintf(name, sizeof name, "s%u", kit_below(&sim->kit, 5));
    struct track *t = name[0] ? named_track(sim, name, shard) : NULL;
    struct kvq__session_spec spec = {.name = name,
                                     .layers = rows,
                                     .n_layers = t ? 0 : MODEL_LAYERS,
                                     .shard = shard,
                                     .shards = sharded ? 2 : 0,
                                     .max_rollback = rollbacks[kit_below(&sim->kit, 5)],
                                     .model = t ? NULL : "m"};
    // Half of them alike, so that they meet in the index.
    spec.prompt_tokens = kit_chance(&sim->kit, 50) ? 0 : kit_below(&sim->kit, SIM_VARIANTS);
    agree(sharded ? named_track(sim, name, 1 - shard) : NULL, &spec);
    uint32_t variant = (uint32_t)spec.prompt_tokens;
    track_rows(variant, rows);
    spec.format = track_format(variant);
    uint32_t story = kit_chance(&sim->kit, 50) ? 0 : kit_below(&sim->kit, SIM_STORIES);
    spec.salt = t ? NULL : story_salt(story);
    if (!sharded) // its shards would begin with different counts
        ask_prefix(sim, a, story, &spec);
    if (!t && sim->kit.core->n_pools > 1 && kit_chance(&sim->kit, 40))
        spec.place = "host";
    if (name[0] && kit_chance(&sim->kit, 40))
        spec.flags |= KVQ__OPEN_READ_ONLY;
    else if (kit_chance(&sim->kit, 20))
        spec.flags |= KVQ__OPEN_TAKE_OVER;
    int expect = predict_open(t, spec.flags);
    const struct kvq__session *s = t ? find_session(sim, t->id) : NULL;
    if (expect == 0 && s && s->in_step.committing && !s->writer &&
        !(spec.flags & (KVQ__OPEN_READ_ONLY | KVQ__OPEN_TAKE_OVER)))
        expect = KVQ_E_BUSY; // its writer died with a step that a GPU has yet to end
    if (expect == 0 && !t && spec.prefix.tokens && !can_share(variant))
        expect = KVQ_E_UNSUPPORTED;
    if (!t && expect != KVQ_E_NO_SESSION && quota_is_full(sim, KVQ__SESSIONS))
        expect = KVQ_E_QUOTA;
    int rc = kvq__session_open(a->member.client, &spec, &info, text);
    sim_trace(sim, (uint64_t)rc);
    if (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in)
        return;
    if (rc != expect)
        fprintf(stderr, "open: %d, %d was expected: %s\n", rc, expect, rc ? text : "");
    MUST(rc == expect);
    MUST(rc == 0 || text[0]);
    if (rc == 0)
        opened(sim, a, h, t, &spec, &info, story);
}

static void let_go(struct sim *sim, struct hold *h)
{
    struct track *t = h->track;
    bool read_only = h->read_only;
    *h = (struct hold){0};
    if (!t)
        return;
    if (read_only)
        t->readers--;
    else
        writer_goes(sim, t);
    t->detached_at = sim->kit.now;
    const struct track *other = track_sibling(sim, t);
    if (!t->writer && !t->readers && (!other || (!other->writer && !other->readers)))
        track_leave(sim, t); // nobody is left to end the step
    if (!t->named && !t->writer && !t->readers)
        track_die(sim, t);
}

static void close_session(struct sim *sim, struct actor *a)
{
    struct hold *h = &a->holds[kit_below(&sim->kit, SIM_HANDLES)];
    char text[KVQ_TEXT_BYTES];
    if (!h->used)
        return;
    if (h->track && !h->read_only && kit_chance(&sim->kit, 20)) {
        struct track *t = h->track, *other = track_sibling(sim, t);
        MUST(kvq__session_drop(a->member.client, h->handle, text) == 0);
        track_die(sim, t);
        if (other)
            track_die(sim, other);
        return;
    }
    MUST(kvq__session_close(a->member.client, h->handle, text) == 0);
    let_go(sim, h);
}

static void toggle_table(struct sim *sim, struct actor *a)
{
    struct hold *h = &a->holds[kit_below(&sim->kit, SIM_HANDLES)];
    if (h->used && h->table && kit_chance(&sim->kit, 30))
        table_close(a, h);
    else if (h->used && !h->taken)
        table_open(sim, a, h);
}

static void pass_time(struct sim *sim)
{
    sim->kit.now += kit_below(&sim->kit, 900) * 1000000ull;
    kvq__core_clock(sim->kit.core, sim->kit.now);
    kvq__core_tick(sim->kit.core);
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        struct track *t = &sim->tracks[i];
        if (!t->used || !t->alive || find_session(sim, t->id))
            continue;
        MUST(t->named && !t->writer && !t->readers);
        MUST(sim->kit.now - t->detached_at >= sim->kit.core->config.keep_ns);
        track_die(sim, t);
    }
}

// ---- Actors ----

static void arrive(struct sim *sim, struct actor *a)
{
    *a = (struct actor){0};
    int rc = member_open(&sim->kit, &a->member, 1000, actor_bytes());
    MUST(rc == 0 || (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in));
    a->present = rc == 0;
    if (a->present && sim->kit.core->n_pools > 1 && kit_chance(&sim->kit, 60))
        order_open(sim, a);
}

static void leave_if_done(struct actor *a)
{
    if (!a->gone || a->phase != IDLE)
        return;
    kit_settle(&a->member);
    kvq__queue_close(&a->member.queue);
    member_free(&a->member);
    order_close(a);
    a->present = a->gone = false;
}

static void die(struct sim *sim, struct actor *a)
{
    if (kit_chance(&sim->kit, 50)) // a command of it is under way
        kvq__client_leave(a->member.client);
    kvq__client_detach(a->member.client);
    kvq__queue_ending(a->member.queue);
    order_end(a);
    a->gone = true;
    a->phase = a->phase == OWED ? IDLE : a->phase;
    for (uint32_t i = 0; i < SIM_HANDLES; i++)
        if (a->holds[i].used)
            let_go(sim, &a->holds[i]);
    sim->deaths++;
    leave_if_done(a);
}

// What comes to an end with the queue: its open step, and what orders its requests.
static void queue_closed(struct sim *sim, struct actor *a)
{
    char text[KVQ_TEXT_BYTES];
    uint32_t fail_one_in = sim->kit.fail_one_in;
    kit_settle(&a->member);
    sim->closed += actor_has_step(sim, a);
    track_leave_all(sim, a);
    kvq__queue_close(&a->member.queue);
    order_close(a);
    sim->kit.fail_one_in = 0;
    MUST(kvq__queue_open(a->member.client, &a->member.queue, text) == 0);
    sim->kit.fail_one_in = fail_one_in;
    a->closing = false;
    if (sim->kit.core->n_pools > 1 && kit_chance(&sim->kit, 60))
        order_open(sim, a);
}

static uint32_t *shuffle(struct kit *kit, uint32_t n)
{
    uint32_t *order = malloc(n * sizeof *order);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = kit_below(kit, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

// The client's stream comes to its signal, and the GPU to what waited for it.
static void pay(struct sim *sim, struct actor *a)
{
    kvq_word64_store_release(&a->timeline[0], a->signal);
    kit_settle(&a->member);
    while (kvq_word64_load_acquire(&a->timeline[1]) < a->signal)
        kit_poll(sim->kit.core);
    a->phase = IDLE;
    op_done(sim, a);
}

// At any moment of a request, as clients may.
static void close_queue(struct sim *sim, struct actor *a)
{
    kvq__queue_ending(a->member.queue);
    order_end(a);
    a->closing = true;
    if (a->phase == OWED)
        pay(sim, a); // the GPU waits for it no longer
    if (a->phase == IDLE)
        queue_closed(sim, a);
}

static void answered(struct sim *sim, struct actor *a)
{
    if (!(a->header.flags & KVQ_REQ_ON_STREAM) || a->gone) {
        op_done(sim, a);
        return;
    }
    order_answered(a);
    if (sim_runs_late() && !a->closing && kit_chance(&sim->kit, 60))
        a->phase = OWED;
    else
        pay(sim, a);
}

static void went(struct sim *sim, struct actor *a, enum kvq__progress p)
{
    if (a->phase != RUNNING && a->phase != ON_GPU && p != KVQ__WAIT)
        op_acquired(sim, a);
    if (p != KVQ__WAIT)
        op_went_on(sim, a);
    a->phase = p == KVQ__RUN ? RUNNING : p == KVQ__WAIT ? WAITING : p == KVQ__GPU ? ON_GPU : IDLE;
    if (p == KVQ__DONE)
        answered(sim, a);
    if (p == KVQ__RUN) {
        a->n_items = kvq__queue_job(a->member.queue)->n_items;
        a->order = shuffle(&sim->kit, a->n_items);
        a->next_item = 0;
    }
    leave_if_done(a);
}

static void go_on(struct sim *sim, struct actor *a)
{
    struct kvq__job *job = kvq__queue_job(a->member.queue);
    uint32_t n = kit_chance(&sim->kit, 70) ? a->n_items : 1 + kit_below(&sim->kit, 8);
    if (a->phase == OWED) {
        if (kit_chance(&sim->kit, 30))
            pay(sim, a);
        return;
    }
    if (a->phase == ON_GPU && !kvq__queue_gpu_idle(a->member.queue)) {
        kit_poll(sim->kit.core);
        return;
    }
    if (a->phase == WAITING || a->phase == ON_GPU) {
        went(sim, a, kvq__request_continue(a->member.queue));
        return;
    }
    for (; n && a->next_item < a->n_items; n--)
        job->run(job, a->order[a->next_item++], sim->kit.workspace);
    if (a->next_item < a->n_items)
        return;
    free(a->order);
    a->order = NULL;
    went(sim, a, kvq__request_continue(a->member.queue));
}

static void act(struct sim *sim, struct actor *a)
{
    if (!a->present) {
        arrive(sim, a);
        return;
    }
    if (a->phase != IDLE) {
        go_on(sim, a);
        return;
    }
    if (a->closing) {
        queue_closed(sim, a);
        return;
    }
    collect_tracks(sim);
    if (!op_build(sim, a))
        return;
    kit_load(&a->member, &a->header, a->entries);
    if (a->header.flags & KVQ_REQ_ON_STREAM)
        order_ask(a);
    went(sim, a, kvq__request_start(a->member.queue));
}

static void pack(struct sim *sim)
{
    if (!sim->background) {
        sim->background = kvq__background_start(sim->kit.core);
        if (sim->background) {
            sim->n_items = sim->background->n_items;
            sim->order = shuffle(&sim->kit, sim->n_items);
            sim->next_item = 0;
        }
        return;
    }
    for (uint32_t n = 1 + kit_below(&sim->kit, 8); n && sim->next_item < sim->n_items; n--)
        sim->background->run(sim->background, sim->order[sim->next_item++], sim->kit.workspace);
    if (sim->next_item < sim->n_items)
        return;
    free(sim->order);
    sim->background = NULL;
    kvq__background_done(sim->kit.core);
}

// ---- Moves ----

// To another place, to disk or back.
static bool is_moving(struct sim *sim, const struct track *t)
{
    const struct track *other = track_sibling(sim, t);
    const struct kvq__session *s = find_session(sim, t->id);
    const struct kvq__session *s2 = other ? find_session(sim, other->id) : s;
    return s->move || s2->move || s->park || s2->park || kvq__is_fetching(s) ||
           kvq__is_fetching(s2);
}

// Whether a client maps it where it is, or its other shard.
static bool is_mapped(struct sim *sim, const struct track *t)
{
    const struct track *other = track_sibling(sim, t);
    return !LIST_EMPTY(&find_session(sim, t->id)->tables) ||
           (other && !LIST_EMPTY(&find_session(sim, other->id)->tables));
}

static void move(struct sim *sim)
{
    static const struct kvq__peer admin = {.admin = true};
    const struct track *t = &sim->tracks[kit_below(&sim->kit, SIM_TRACKS)];
    struct kvq__move_info info;
    char text[KVQ_TEXT_BYTES] = "", id[24];
    struct kvq__move_spec spec = {
        .place =
            kvq__pool_name(&sim->kit.core->pools[kit_below(&sim->kit, sim->kit.core->n_pools)]),
        .one_shard = kit_chance(&sim->kit, 30),
        .wait_ms = 1 + kit_below(&sim->kit, 3000)};
    if (!t->used || !t->alive)
        return;
    spec.shard = t->shard;
    bool moving = is_moving(sim, t);
    snprintf(id, sizeof id, "#%llu", (unsigned long long)t->id);
    int rc = kvq__session_move_named(sim->kit.core, &admin, NULL, id, &spec, &info, text);
    MUST(rc == 0 || text[0]);
    MUST(rc == 0 || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_LIMIT ||
         (rc == KVQ_E_QUOTA && quota_was_met(sim)) ||
         (rc == KVQ_E_BUSY && (moving || is_mapped(sim, t))));
}

// ---- One run ----

// Streams without threads do nothing at times, and much at others.
static void gpus_go_on(struct sim *sim)
{
    static const uint32_t most[] = {1, 1, 8, 64};
    bool (*step)(void) = sim_gpus() ? sim_gpus()->step : NULL;
    if (!step)
        return;
    for (uint32_t n = kit_below(&sim->kit, most[kit_below(&sim->kit, 4)]); n && step(); n--)
        continue;
}

static void happen(struct sim *sim)
{
    struct actor *a = &sim->actors[kit_below(&sim->kit, SIM_ACTORS)];
    uint32_t what = kit_below(&sim->kit, 100);
    bool here = a->present && !a->gone;
    collect_tracks(sim);
    gpus_go_on(sim);
    if (kit_chance(&sim->kit, kvq__core_moves(sim->kit.core) ? 70 : 20))
        kit_poll(sim->kit.core);
    track_places(sim);
    bool busy = sim->keep.save || sim->keep.restore;
    if (kit_chance(&sim->kit, park_waits(sim) ? 30 : busy ? 15 : 8))
        keep_happen(sim);
    if (sim->limits && kit_chance(&sim->kit, 4))
        quota_happen(sim);
    if (what < 78)
        act(sim, a);
    else if (what < 88)
        pack(sim);
    else if (what < 93 && here)
        open_session(sim, a);
    else if (what < 95 && here)
        close_session(sim, a);
    else if (what < 96 && here && kit_chance(&sim->kit, 35))
        die(sim, a);
    else if (what < 96 && here && !a->closing)
        close_queue(sim, a);
    else if (what == 96 && here && kit_chance(&sim->kit, 50))
        toggle_table(sim, a);
    else if (what == 96)
        for (uint32_t i = 0; sim->kit.core->n_pools > 1 && i < 8; i++)
            move(sim);
    else if (what >= 97)
        pass_time(sim);
}

static void end(struct sim *sim)
{
    sim->kit.fail_one_in = 0;
    keep_end(sim);
    while (sim->background)
        pack(sim);
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        if (sim->actors[i].present && !sim->actors[i].gone)
            die(sim, &sim->actors[i]);
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        while (sim->actors[i].present)
            act(sim, &sim->actors[i]);
    // Moves, and packing that nobody waits for.
    while (kvq__core_moves(sim->kit.core) || !kvq__core_idle(sim->kit.core))
        kit_poll(sim->kit.core);
    core_check(sim->kit.core);
    kvq__core_counts(sim->kit.core, &sim->counts);
    quota_end(sim);
    trace_event(sim);
    kit_close(&sim->kit);
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].used)
            model_free(&sim->tracks[i].model);
}

static void add_counts(struct kvq__counts *total, const struct kvq__counts *one)
{
    uint64_t sum[KVQ__COUNTERS], add[KVQ__COUNTERS];
    memcpy(sum, total, sizeof sum);
    memcpy(add, one, sizeof add);
    for (uint32_t i = 0; i < KVQ__COUNTERS; i++)
        sum[i] += add[i];
    memcpy(total, sum, sizeof sum);
}

// Its trace.
static uint64_t run_seed(uint64_t seed, uint32_t events, struct sim *total)
{
    struct sim *sim = calloc(1, sizeof *sim);
    uint64_t pool = seed % 4 ? (uint64_t)(6 + seed % 19) * 2 * MIB : 96ull * MIB;
    uint64_t limit = seed % 5 == 1 ? 5ull * MIB : 0;
    bool grows = !sim_gpus() && seed % 3 == 0; // extents of GPUs have the size that these have
    sim_in_steps(seed);
    sim_reserves(seed);
    kit_extents(grows ? 8 * MIB : 2 * MIB);
    snprintf(kit_context, sizeof kit_context, "(seed %llu)", (unsigned long long)seed);
    kit_open(&sim->kit, seed, pool, limit);
    // So that larger ones come in pools as small as these.
    for (uint32_t i = 0; grows && i < 2; i++)
        sim->kit.core->pools[0].sizes[i].most = 1 + seed / (i ? 9 : 3) % 3;
    sim->kit.table_gone = table_free;
    quota_begin(sim, seed % 3 == 1);
    sim->kit.fail_one_in = seed % 3 == 2 ? 30 : 0;
    sim->kit.core->config.evict_idle_ns = seed % 2 ? 200000000 : 1000000000;
    sim->kit.core->config.release_work = seed % 3 ? 1 + (uint32_t)(seed % 50) : 2048;
    sim->kit.core->config.evict_above = seed % 4 == 3 ? 70 : 0;
    sim->kit.core->config.park_idle_ns = seed % 7 == 6 ? 3000000000 : 0;
    sim->workspace = aligned_alloc(64, (kvq_workspace_bytes() + 63) & ~(size_t)63);
    for (uint32_t i = 0; i < events; i++) {
        happen(sim);
        core_check(sim->kit.core);
        check_tracks(sim);
        trace_event(sim);
    }
    end(sim);
    total->tables += sim->tables;
    total->keep.saves += sim->keep.saves;
    total->keep.restores += sim->keep.restores;
    total->keep.read_prefixes += sim->keep.read_prefixes;
    add_counts(&total->counts, &sim->counts);
    total->checked += sim->checked;
    total->checked_gpu += sim->checked_gpu;
    total->streamed += sim->streamed;
    total->committed += sim->committed;
    total->refused += sim->refused;
    total->failed_memory += sim->failed_memory;
    total->deaths += sim->deaths;
    total->closed += sim->closed;
    total->forks += sim->forks;
    total->pairs += sim->pairs;
    total->undone += sim->undone;
    total->moved += sim->moved;
    total->prefixes += sim->prefixes;
    total->shared += sim->shared;
    total->lowered += sim->lowered;
    total->above += sim->above;
    uint64_t trace = sim->trace;
    free(sim->workspace);
    free(sim);
    return trace;
}

// Whatever was run before it, a seed is the same run: what is not is no simulation.
static void run_again(uint64_t first, uint64_t count, uint32_t events, const uint64_t *traces)
{
    static struct sim total;
    for (uint64_t i = 0; i < count; i++)
        MUST(run_seed(first + i, events, &total) == traces[i]);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : sim_seeds(), n = 0;
    uint32_t events = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : DEFAULT_EVENTS;
    tell = argc > 4;
    static struct sim total;
    kit_formats(track_formats(), 1);
    kit_saves(true);
    kit_isa(KVQ_ISA_C); // the same run on every machine
    const struct kit_gpus *gpus = sim_gpus();
    bool whole = count >= sim_seeds() && events >= DEFAULT_EVENTS;
    kit_gpus(gpus);
    uint64_t *traces = calloc(count, sizeof *traces), again = (count + 7) / 8;
    for (; n < count; n++)
        traces[n] = run_seed(first + n, events, &total);
    run_again(first, again, events, traces);
    sim_trace_bytes(&total, traces, count * sizeof *traces);
    free(traces);
    printf("trace of seeds %llu to %llu: %016llx, the same again in %llu\n",
           (unsigned long long)first, (unsigned long long)(first + count - 1),
           (unsigned long long)total.trace, (unsigned long long)again);
    sim_print(&total, n);
    return !whole || sim_all_happened(&total, gpus) ? 0 : 1;
}
