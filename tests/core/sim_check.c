// SPDX-License-Identifier: Apache-2.0
//
// The simulation's comparisons: what the core attends to and reads back, and what the model does;
// and whether all that it is about has happened.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/core/sim.h"

// One row of one head: to the bit, or to what a GPU's rounding allows.
static bool same_row(const float *got, const float *want, uint32_t n, float slack)
{
    double error = 0, size = 0;
    if (slack == 0.0f || memcmp(got, want, n * sizeof *got) == 0)
        return memcmp(got, want, n * sizeof *got) == 0;
    for (uint32_t i = 0; i < n; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    return sqrt(error) <= slack * (sqrt(size) + (n == 1 ? 1.0 : 0.05));
}

static void check_rows(struct sim *sim, const struct part *p, const float *got, uint32_t got_row,
                       const float *want, uint32_t heads, uint32_t dim, uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = 0; h < heads; h++) {
            const float *row = got + (size_t)r * got_row + (size_t)h * dim;
            MUST(
                same_row(row, want + ((size_t)r * heads + h) * dim, dim, p->on_gpu ? 4e-3f : 0.0f));
            sim_trace_bytes(sim, row, dim * sizeof *row);
        }
}

void sim_check_attend(struct sim *sim, struct actor *a, uint32_t i)
{
    static float out[SIM_QUERIES], lse[SIM_LSES];
    const struct kvq_entry_wire *e = &a->entries[i];
    const struct part *p = &a->parts[i];
    const struct kvq_shape *s = &p->track->model.layers[a->header.layer].shape;
    struct kvq_view q = {actor_q(a) + (size_t)e->q_row * SIM_ROW, SIM_ROW * sizeof(float),
                         SIM_DIM * sizeof(float), KVQ_F32};
    uint32_t flags = a->header.flags & KVQ_REQ_PAST_ONLY ? KVQ_ATTEND_PAST_ONLY : 0;
    model_attend(&p->track->model, a->header.layer, p->past, e->append, flags, &q, e->queries, out,
                 lse);
    check_rows(sim, p, actor_out(a) + (size_t)e->q_row * SIM_ROW, SIM_ROW, out, s->q_heads, SIM_DIM,
               e->queries);
    check_rows(sim, p, actor_lse(a) + (size_t)e->q_row * SIM_HEADS, SIM_HEADS, lse, s->q_heads, 1,
               e->queries);
    sim->checked++;
    sim->checked_gpu += p->on_gpu;
}

void sim_check_read(struct sim *sim, struct actor *a, uint32_t i)
{
    static float k[SIM_MAX_STEP * SIM_DIM], v[SIM_MAX_STEP * SIM_DIM];
    const struct part *p = &a->parts[i];
    const struct kvq_entry_wire *e = &a->entries[i];
    uint32_t heads = p->track->model.layers[a->header.layer].shape.kv_heads;
    uint32_t n = (uint32_t)p->value;
    size_t row = e->row + (p->from - e->position);
    for (uint32_t h = 0; n && h < heads; h++) {
        model_read(&p->track->model, a->header.layer, p->past, p->from, n, h, k, v);
        check_rows(sim, p, actor_k(a) + row * SIM_ROW + h * SIM_DIM, SIM_ROW, k, 1, SIM_DIM, n);
        check_rows(sim, p, actor_v(a) + row * SIM_ROW + h * SIM_DIM, SIM_ROW, v, 1, SIM_DIM, n);
    }
    sim->checked++;
    sim->checked_gpu += p->on_gpu;
}

void sim_print(const struct sim *t, uint64_t seeds)
{
    const uint64_t parked = t->counts.parked_room + t->counts.parked_quota + t->counts.parked_idle +
                            t->counts.parked_asked;
    const struct {
        const char *what;
        uint64_t n;
    } rows[] = {
        {"outputs compared", t->checked},
        {"of GPUs", t->checked_gpu},
        {"requests on streams", t->streamed},
        {"tokens committed", t->committed},
        {"refusals as predicted", t->refused},
        {"times out of memory", t->failed_memory},
        {"clients died", t->deaths},
        {"queues closed in the middle of a step", t->closed},
        {"forks", t->forks},
        {"steps of two shards committed", t->pairs},
        {"and undone", t->undone},
        {"sessions moved", t->moved},
        {"sessions began with others' tokens", t->prefixes},
        {"such tokens", t->shared},
        {"prefixes read", t->keep.read_prefixes},
        {"page tables compared", t->tables},
        {"sessions saved", t->keep.saves},
        {"restored", t->keep.restores},
        {"parked", parked},
        {"brought back", t->counts.fetched},
        {"not brought back", t->counts.fetch_failed},
        {"limits set below what was used", t->lowered},
        {"refusals by limits", t->above},
        {"requests waited for room", t->counts.waited_for_room},
        {"refused for room", t->counts.refused_for_room},
        {"sessions demoted", t->counts.demoted},
        {"and back", t->counts.promoted},
    };
    printf("%llu seeds", (unsigned long long)seeds);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        printf(", %llu %s", (unsigned long long)rows[i].n, rows[i].what);
    printf("\n");
}

bool sim_all_happened(const struct sim *total, const struct kit_gpus *gpus)
{
    const bool streams = gpus && kvq__gpu_clients_alone(gpus->gpus[0]) > 0;
    return total->checked && !total->checked_gpu == !gpus && !total->streamed == !streams &&
           total->committed && total->refused && total->failed_memory && total->deaths &&
           total->closed && total->forks && total->tables && total->keep.saves &&
           total->keep.restores && total->counts.parked_idle && total->counts.fetched &&
           total->lowered && total->above &&
           (gpus ? total->moved
                 : total->pairs && total->undone && total->prefixes && total->keep.read_prefixes &&
                       total->counts.waited_for_room && total->counts.refused_for_room &&
                       total->counts.fetch_failed);
}
