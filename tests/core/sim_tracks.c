// SPDX-License-Identifier: Apache-2.0
//
// The simulation's tracks: sessions as they should be.
#include "daemon/core/residency/evict.h"
#include "tests/core/sim.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct recipe {
    const char *format;
    uint16_t q_heads, kv_heads;
    uint32_t window;
    float softcap;
    int32_t kv_from;
};

// Few heads and small dims, but every kind of layer.
static const struct recipe recipes[][MODEL_LAYERS] = {
    {{"oscar2", 4, 2, 0, 0, -1}, {"f16", 2, 1, 160, 0, -1}, {"oscar2", 2, 2, 0, 0, 0}},
    {{"kvq2", 2, 1, 0, 0, -1},
     {"kivi2:sink=96:unit=32", 2, 2, 150, 0, -1},
     {"kvq2", 2, 1, 0, 0, 0}},
    {{"oscar3", 2, 2, 0, 0, -1}, {"oscar4", 4, 1, 200, 0, -1}, {"oscar4", 2, 1, 330, 30.0f, 1}},
    {{"oscar2-xh", 4, 2, 0, 0, -1}, {"oscar2-xh", 2, 2, 130, 0, 0}, {"f16", 1, 1, 0, 0, -1}},
    {{"innerq-hybrid", 4, 2, 0, 0, -1}, {"ott2-oscar", 2, 1, 0, 0, -1}, {"ott2", 1, 1, 0, 0, -1}},
    {{"kivi-sink2", 2, 2, 0, 0, -1}, {"innerq-small", 2, 1, 150, 0, -1}, {"int8", 1, 1, 0, 0, -1}},
    // Asked for by one name of the configuration: units, windows, sinks and codes of each layer
    // are others.
    {{"ott2:unit=32:k_group=32", 2, 2, 0, 0, -1},
     {"innerq-base+kivi2-g64:sink=64", 4, 1, 0, 0, -1},
     {"ott2:sink=32:recent=17", 1, 1, 0, 0, -1}},
};
enum { RECIPES = sizeof recipes / sizeof recipes[0] };
static_assert((int)RECIPES == (int)SIM_VARIANTS, "every recipe is used");

enum { MIX = RECIPES - 1 };

static void parse(const char *name, struct kvq_format *f)
{
    char text[400];
    if (kvq_format_parse(name, f, text, sizeof text))
        abort();
}

const struct kvq__own_format *track_formats(void)
{
    static struct kvq__own_format mix = {
        .name = "mix",
        .has_rest = true,
        .n_ranges = 2,
        .ranges = {{.first = 1, .last = 1}, {.first = 2, .last = 2}}};
    parse(recipes[MIX][0].format, &mix.rest);
    snprintf(mix.rest.name, sizeof mix.rest.name, "mix");
    parse(recipes[MIX][1].format, &mix.ranges[0].row);
    parse(recipes[MIX][2].format, &mix.ranges[1].row);
    return &mix;
}

const char *track_format(uint32_t variant)
{
    return variant % RECIPES == MIX ? "mix" : NULL;
}

void track_rows(uint32_t variant, struct kvq__layer_row *rows)
{
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        const struct recipe *r = &recipes[variant % RECIPES][i];
        rows[i] = (struct kvq__layer_row){.q_heads = r->q_heads,
                                          .kv_heads = r->kv_heads,
                                          .k_dim = SIM_DIM,
                                          .v_dim = SIM_DIM,
                                          .window = r->window,
                                          .softcap = r->softcap,
                                          .format = variant % RECIPES == MIX ? NULL : r->format,
                                          .kv_from = r->kv_from};
    }
}

// The first layers of a format with outliers go without.
static const struct kvq_format *format_of(const char *name, uint32_t layer)
{
    static struct kvq_format composed[3 * RECIPES];
    char changed[KVQ_FORMAT_NAME + 16];
    struct kvq_format row;
    parse(name, &row);
    bool plain = layer < row.plain_layers && row.outliers;
    snprintf(changed, sizeof changed, "%s%s", name,
             !plain              ? ""
             : strchr(name, ':') ? ":outliers=0"
                                 : "-o0");
    for (uint32_t i = 0;; i++) {
        assert(i < 3 * RECIPES);
        if (composed[i].name[0] == '\0')
            parse(changed, &composed[i]);
        if (strcmp(composed[i].name, changed) == 0)
            return &composed[i];
    }
}

static void fill_layer(struct model *m, uint32_t layer, const struct recipe *r)
{
    m->layers[layer] = (struct model_layer){
        .format = format_of(r->format, layer),
        .learn = kvq_learn_tokens(format_of(r->format, layer), 0),
        .shape = {.q_heads = r->q_heads,
                  .kv_heads = r->kv_heads,
                  .k_dim = SIM_DIM,
                  .v_dim = SIM_DIM,
                  .dtype = KVQ_F16,
                  .v_rotation = (uint8_t)kvq_v_rotation_by_paper(format_of(r->format, layer)),
                  .window = r->window,
                  .softcap = r->softcap,
                  .scale = 0.125f},
        .source = r->kv_from >= 0 ? (uint32_t)r->kv_from : layer,
    };
}

// How far back each cache is read, over the layers that read it.
static void find_keeps(struct model *m)
{
    for (uint32_t own = 0; own < MODEL_LAYERS; own++) {
        bool all = false;
        uint32_t most = 0;
        for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
            if (m->layers[i].source != own)
                continue;
            all = all || m->layers[i].shape.window == 0;
            most = m->layers[i].shape.window > most ? m->layers[i].shape.window : most;
        }
        m->layers[own].keep = all ? 0 : most;
    }
}

struct track *track_new(struct sim *sim, bool named, uint32_t variant, uint32_t max_rollback)
{
    struct track *t = sim->tracks;
    while (t < sim->tracks + SIM_TRACKS && t->used)
        t++;
    if (t == sim->tracks + SIM_TRACKS)
        return NULL;
    *t = (struct track){.used = true, .named = named, .shards = 1, .variant = variant};
    t->model.kernels = kvq_kernels_get(KVQ_ISA_C);
    t->model.workspace = sim->workspace;
    t->model.max_rollback = max_rollback;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++)
        fill_layer(&t->model, i, &recipes[variant % RECIPES][i]);
    find_keeps(&t->model);
    return t;
}

void track_leave_step(struct track *t)
{
    if (!t->stepper && !t->prepared)
        return;
    t->stepper = NULL;
    t->prepared = false;
    t->step_tokens = 0;
    t->step_told = false;
    t->step_serial++;
    memset(t->appended, 0, sizeof t->appended);
    t->spoiled = false;
}

struct track *track_sibling(struct sim *sim, const struct track *t)
{
    for (uint32_t i = 0; t->shards > 1 && i < SIM_TRACKS; i++) {
        struct track *other = &sim->tracks[i];
        if (other != t && other->used && other->alive && strcmp(other->name, t->name) == 0)
            return other;
    }
    return NULL;
}

void track_leave(struct sim *sim, struct track *t)
{
    struct track *other = track_sibling(sim, t);
    track_leave_step(t);
    if (!other || (!other->stepper && !other->prepared))
        return;
    track_leave_step(other);
    other->undone_by = t->shard + 1;
    sim->undone++;
}

struct track *track_last_joined(struct sim *sim, const struct actor *a)
{
    struct track *last = NULL;
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        struct track *t = &sim->tracks[i];
        if (t->stepper == a && (!last || t->joined > last->joined))
            last = t;
    }
    return last;
}

void track_leave_all(struct sim *sim, const struct actor *a)
{
    struct track *t;
    while ((t = track_last_joined(sim, a)))
        track_leave(sim, t);
}

struct kvq__session *find_session(const struct sim *sim, uint64_t id)
{
    struct kvq__namespace *ns;
    struct kvq__session *s;
    TAILQ_FOREACH (ns, &sim->kit.core->namespaces, link)
        TAILQ_FOREACH (s, &ns->sessions, link)
            if (s->id == id)
                return s;
    return NULL;
}

void track_places(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        struct track *t = &sim->tracks[i];
        const struct kvq__session *s = t->used && t->alive ? find_session(sim, t->id) : NULL;
        if (!s)
            continue;
        // A stream's order is kept where it belongs, though it may be elsewhere for a while.
        bool on_gpu = s->pool->gpu, streams = kvq__home_of(s) == &sim->kit.core->pools[1];
        sim->moved += t->on_gpu != on_gpu || t->streams != streams;
        t->on_gpu = on_gpu;
        t->streams = streams;
    }
}

void track_die(struct sim *sim, struct track *t)
{
    track_leave_step(t);
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        for (uint32_t j = 0; j < SIM_HANDLES; j++)
            if (sim->actors[i].holds[j].track == t)
                sim->actors[i].holds[j] = (struct hold){0};
    t->alive = false;
    t->writer = NULL;
    t->readers = 0;
}
