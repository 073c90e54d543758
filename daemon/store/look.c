// SPDX-License-Identifier: Apache-2.0
//
// What an import of a file would do: the names that the session would get, and all that stands in
// the way, in the order in which an import meets it. Nothing changes, and no turn is waited for, so
// what holds by the time of an import may be another thing.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/internal.h"

enum { MOST_OBSTACLES = 8 };

struct kvq__look {
    struct kvq_store_file file; // its names first; the rest once all of it has been read
    Kvq__ImportLook *told;
};

// What task->rc and text say stands in the way, and is told; the task goes on.
static void note_obstacle(struct kvq__task *t, bool opening)
{
    Kvq__ImportLook *told = t->look->told;
    Kvq__Obstacle *o = t->rc < 0 && told->n_obstacles < MOST_OBSTACLES
                           ? kvq_arena_alloc(t->arena, sizeof *o)
                           : NULL;
    if (o) {
        kvq__obstacle__init(o);
        o->status = t->rc;
        o->text = kvq_arena_text(t->arena, t->text[0] ? t->text : kvq_status_text(t->rc));
        o->opening = opening;
        told->obstacles[told->n_obstacles++] = o;
    }
    t->rc = 0;
    t->text[0] = '\0';
}

static bool open_look(struct kvq__task *t)
{
    Kvq__ImportLook *told = kvq_arena_alloc(t->arena, sizeof *told);
    Kvq__Obstacle **list = kvq_arena_alloc(t->arena, MOST_OBSTACLES * sizeof *list);
    if (!told || !list || !(t->look = calloc(1, sizeof *t->look)))
        return false;
    kvq__import_look__init(told);
    told->obstacles = list;
    t->look->told = told;
    return true;
}

// ---- On one of libuv's threads ----

static void look_at_names(struct kvq__task *t)
{
    const Kvq__LookAtImport *ask = t->request->look_at_import;
    const char *ns = ask->ref ? ask->ref->namespace_ : "", *name = ask->ref ? ask->ref->name : "";
    struct kvq_store_session *of = &t->look->file.session;
    t->rc = kvq_store_exported(t->jobs->store, ask->path, of, t->text, sizeof t->text);
    snprintf(t->ns, sizeof t->ns, "%s", ns[0] ? ns : of->space);
    snprintf(t->name, sizeof t->name, "%s", name[0] ? name : of->name);
    if (t->rc == 0)
        t->rc = kvq__jobs_check_name(t, t->name);
}

static void look_at_body(struct kvq__task *t)
{
    const struct kvq_store_watch watch = {kvq__jobs_look_for_end, t->jobs};
    struct kvq_store_file whole;
    t->rc = kvq_store_look(t->jobs->store, t->request->look_at_import->path, &watch, &whole,
                           t->text, sizeof t->text);
    if (t->rc == 0)
        t->look->file = whole;
    if (t->rc != KVQ_E_CANCELLED)
        note_obstacle(t, false);
}

static void look_for_room(struct kvq__task *t)
{
    const Kvq__LookAtImport *ask = t->request->look_at_import;
    const struct kvq_store_file *file = &t->look->file;
    struct kvq_store *store = t->jobs->store;
    t->rc = kvq_store_look_name(store, ask->path, file, t->ns, t->name, ask->replace, t->text,
                                sizeof t->text);
    note_obstacle(t, false);
    t->rc = kvq_store_look_room(store, file, t->ns, t->name, t->text, sizeof t->text);
    note_obstacle(t, false);
}

static int read_saved(struct kvq__task *t, struct kvq__saved *saved)
{
    const struct kvq_store_file *file = &t->look->file;
    struct kvq_arena arena;
    uint8_t *room = malloc(KVQ_WIRE_ARENA);
    if (!room)
        return KVQ_E_NO_MEMORY;
    kvq_arena_init(&arena, room, KVQ_WIRE_ARENA);
    int rc = kvq__saved_unpack(file->opaque, file->session.n_bytes, &arena, saved, t->text);
    free(room);
    return rc;
}

static int check_codebook(struct kvq__task *t, const struct kvq__saved *saved, uint32_t layer,
                          const char *name)
{
    const struct kvq__saved_layer *l = &saved->layers[layer];
    struct kvq__codebooks *books = t->jobs->server->codebooks;
    struct kvq_shape shape = {.q_heads = l->row.q_heads,
                              .kv_heads = l->row.kv_heads,
                              .dtype = (uint8_t)saved->dtype,
                              .v_rotation = l->v_rotation};
    char why[KVQ_TEXT_BYTES / 2];
    struct kvq_book book;
    void *hold = NULL;
    kvq_shape_set_dims(&shape, l->row.k_dim, l->row.v_dim);
    int rc = kvq__codebooks_get(books, name, layer, &l->format, &shape, &book, &hold, why);
    if (rc < 0) {
        snprintf(t->text, sizeof t->text, "layer %u: %s", layer, why);
        return rc;
    }
    bool other = l->book && l->book != kvq__codebooks_id(hold);
    kvq__codebooks_release(books, hold);
    if (other)
        snprintf(t->text, sizeof t->text,
                 "layer %u: the session was saved with another codebook of the name %s", layer,
                 name);
    return other ? KVQ_E_FORMAT : 0;
}

// An import does without codebooks, an open does not. One that is missing is told once.
static void look_at_codebooks(struct kvq__task *t)
{
    struct kvq__saved saved = {0};
    struct kvq__book_holds holds = {0};
    t->rc = t->look->file.opaque ? read_saved(t, &saved) : 0;
    for (uint32_t i = 0; i < saved.n_layers && t->rc == 0; i++) {
        const char *at = strchr(saved.layers[i].format.name, '@');
        if (!at || saved.layers[i].row.kv_from >= 0)
            continue;
        kvq__codebooks_load(t->jobs->server->codebooks, at + 1, &holds);
        t->rc = check_codebook(t, &saved, i, at + 1);
    }
    kvq__codebooks_let_go(&holds);
    free(saved.layers);
    note_obstacle(t, true);
}

// ---- On the poller's thread ----

static void look_at_memory(struct kvq__task *t)
{
    char name[KVQ_NAME_BYTES];
    snprintf(name, sizeof name, "%s", t->ns);
    kvq__jobs_check_imported(t);
    bool there = t->rc == 0;
    note_obstacle(t, false);
    if (!there)
        snprintf(t->ns, sizeof t->ns, "%s", name);
    t->rc = there ? kvq__jobs_refuse_here(t) : 0;
    note_obstacle(t, false);
}

// ---- The command ----

static void answer_look(struct kvq__task *t)
{
    Kvq__ImportLook *told = t->look->told;
    const struct kvq_store_session *s = &t->look->file.session;
    told->namespace_ = kvq_arena_text(t->arena, t->ns);
    told->name = kvq_arena_text(t->arena, t->name);
    told->tokens = s->tokens;
    told->shards = s->shards;
    told->blocks = s->blocks;
    told->bytes = s->bytes;
    t->reply->import_look = told;
    t->reply->result_case = KVQ__REPLY__RESULT_IMPORT_LOOK;
}

void kvq__jobs_look(struct kvq__task *t)
{
    t->rc = KVQ_E_NO_MEMORY;
    if (!open_look(t))
        return;
    kvq__task_at_work(t, look_at_names);
    if (t->rc == 0) {
        kvq__task_at_poller(t, look_at_memory);
        kvq__task_at_work(t, look_at_body);
    }
    if (t->rc == 0) {
        kvq__task_at_work(t, look_for_room);
        kvq__task_at_work(t, look_at_codebooks);
        answer_look(t);
    }
    free(t->look->file.opaque);
    free(t->look);
    t->look = NULL;
}
