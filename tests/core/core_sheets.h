// SPDX-License-Identifier: Apache-2.0
//
// For core_kit.c alone: which sheets of page tables several sessions have, so that their blocks are
// counted once, and whether as many have them as they say.
#ifndef KVQ_TESTS_CORE_SHEETS_H
#define KVQ_TESTS_CORE_SHEETS_H

#include "daemon/core/residency/move.h"
#include "tests/core/core_kit.h"

// Those that several have, by a hash of their address: who has them first, and how many do. Entries
// of earlier checks count as free.
static struct {
    const struct kvq__sheet *sheet;
    const void *first;
    uint32_t owners;
    uint64_t check;
} sheets[1 << 14];
static uint64_t this_check;

static uint32_t place_of(const struct kvq__sheet *sheet)
{
    uint32_t n = sizeof sheets / sizeof *sheets, tries = 0;
    uint32_t at = (uint32_t)((uintptr_t)sheet >> 6) * 0x9e3779b1u % n;
    while (sheets[at].check == this_check && sheets[at].sheet != sheet) {
        at = (at + 1) % n;
        MUST(++tries < n);
    }
    return at;
}

static void note_sheets(struct kvq__sheet *const *all, uint32_t n, const void *owner)
{
    for (uint32_t i = 0; i < n; i++) {
        MUST(all[i]->refs > 0);
        if (all[i]->refs == 1)
            continue;
        uint32_t at = place_of(all[i]);
        if (sheets[at].check != this_check) {
            sheets[at].sheet = all[i];
            sheets[at].first = owner;
            sheets[at].owners = 0;
            sheets[at].check = this_check;
        }
        sheets[at].owners++;
    }
}

// Whether the sheet's blocks are to be counted where this one has it.
static bool counts(const struct kvq__sheet *sheet, const void *owner)
{
    return sheet->refs == 1 || sheets[place_of(sheet)].first == owner;
}

// Likewise of a move's reference there.
static bool counts_moved(const struct kvq__moved *m, uint64_t ref)
{
    uint64_t page = ref % (2 * (uint64_t)m->n_pages + 1) / 2; // behind the last one: the extras
    return page == m->n_pages || counts(m->sheets[page / KVQ__SHEET_PAGES], m);
}

static void check_sheets(const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    const struct kvq__move *move;
    this_check++;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        TAILQ_FOREACH (s, &ns->sessions, link)
            note_sheets(s->sheets, s->n_sheets, s);
    TAILQ_FOREACH (s, &core->ended, link)
        note_sheets(s->sheets, s->n_sheets, s);
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        for (uint32_t i = 0; i < move->n; i++)
            note_sheets(move->moved[i].sheets, move->moved[i].n_sheets, &move->moved[i]);
    for (uint32_t i = 0; i < sizeof sheets / sizeof *sheets; i++)
        MUST(sheets[i].check != this_check || sheets[i].owners == sheets[i].sheet->refs);
}

#endif
