// SPDX-License-Identifier: Apache-2.0
// Names of sessions that are cut short: one that begins only one name stands for that name. The
// daemon is asked for the exact name first; only if there is none, lists are looked through.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/status.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"

enum { MOST_SHOWN = 5 };

// Different names that begin so, in order.
struct matches {
    size_t n, room;
    char **names;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void add(struct matches *m, const char *name)
{
    for (size_t i = 0; i < m->n; i++) // each shard of a session has its name
        if (strcmp(m->names[i], name) == 0)
            return;
    if (m->n == m->room) {
        size_t room = m->room ? 2 * m->room : 16;
        char **more = realloc(m->names, room * sizeof *more);
        if (!more)
            return;
        m->names = more;
        m->room = room;
    }
    char *copy = strdup(name);
    if (copy)
        m->names[m->n++] = copy;
}

static void free_matches(struct matches *m)
{
    for (size_t i = 0; i < m->n; i++)
        free(m->names[i]);
    free(m->names);
}

// The name of an element of one of the three lists.
static const char *name_of(const ProtobufCMessage *element)
{
    if (element->descriptor == &kvq__session__descriptor)
        return ((const Kvq__Session *)element)->name;
    if (element->descriptor == &kvq__saved_entry__descriptor)
        return ((const Kvq__SavedEntry *)element)->name;
    return ((const Kvq__RemoteEntry *)element)->name;
}

// A list that cannot be had, as without a storage, has no names.
static void look_through(struct kvq__ctl *ctl, struct matches *m, const char *prefix,
                         int (*ask)(struct kvq__ctl *ctl, struct kvq__ctl_list *list))
{
    struct kvq__ctl_list list;
    if (ask(ctl, &list) != KVQ_EXIT_OK)
        return;
    for (size_t i = 0; i < list.n; i++)
        if (strncmp(name_of(list.elements[i]), prefix, strlen(prefix)) == 0)
            add(m, name_of(list.elements[i]));
    kvq__ctl_list_free(&list);
}

static struct matches find_matches(struct kvq__ctl *ctl, const char *prefix)
{
    struct matches m = {0};
    char own[32];
    const char *ns = ctl->ns;
    snprintf(own, sizeof own, "uid-%u", (unsigned)geteuid());
    ctl->ns = ctl->places & KVQ__CTL_REMOTE && ctl->from ? ctl->from : ns ? ns : own;
    ctl->quiet = true;
    if (ctl->places & KVQ__CTL_MEMORY)
        look_through(ctl, &m, prefix, kvq__ctl_ask_sessions);
    if (ctl->places & KVQ__CTL_SAVED)
        look_through(ctl, &m, prefix, kvq__ctl_ask_saved);
    if (ctl->places & KVQ__CTL_REMOTE)
        look_through(ctl, &m, prefix, kvq__ctl_ask_remote);
    ctl->quiet = false;
    ctl->ns = ns;
    if (m.n)
        qsort(m.names, m.n, sizeof *m.names, by_name);
    return m;
}

static void explain_choice(const char *prefix, const struct matches *m)
{
    fprintf(stderr,
            "kvqctl: no session has the name \"%s\", and %zu %s so:", kvq__ctl_clean(prefix), m->n,
            m->n == 1 ? "name begins" : "names begin");
    for (size_t i = 0; i < m->n && i < MOST_SHOWN; i++)
        fprintf(stderr, "%s %s", i ? "," : "", kvq__ctl_clean(m->names[i]));
    if (m->n > MOST_SHOWN)
        fprintf(stderr, ", and %zu more", m->n - MOST_SHOWN);
    fprintf(stderr, m->n == 1 ? "; give the whole name\n" : "; give more of the name\n");
}

bool kvq__ctl_complete_name(struct kvq__ctl *ctl, bool *told)
{
    const char *prefix = ctl->named;
    *told = false;
    if (!prefix || !*prefix || *prefix == '#' || ctl->exact)
        return false;
    ctl->named = NULL; // only once, and not for what is asked here
    struct matches m = find_matches(ctl, prefix);
    *told = m.n > 1 || (m.n == 1 && ctl->whole_name);
    if (*told)
        explain_choice(prefix, &m);
    if (m.n == 1 && !ctl->whole_name) {
        ctl->full_name = m.names[0];
        m.names[0] = NULL;
    }
    free_matches(&m);
    return ctl->full_name != NULL;
}

int kvq__ctl_run_named(struct kvq__ctl *ctl, const struct kvq__ctl_command *command, char **args)
{
    ctl->places = command->places;
    ctl->named = ctl->places ? args[0] : NULL;
    ctl->whole_name = command->whole_name;
    // The daemon says so of the command itself; a preview puts lists together, and would look at
    // the sessions of whoever has this user's number there.
    if (ctl->dry_run && ctl->named && *ctl->named != '#' && ctl->connect && !ctl->ns)
        return kvq__ctl_bad_usage("a key has no namespace of its own: with --connect name the "
                                  "session's, --namespace NAME",
                                  NULL);
    kvq__ctl_run *run = ctl->dry_run ? command->preview : command->run;
    int result = run(ctl, args);
    if (!ctl->full_name)
        return result;
    args[0] = ctl->full_name;
    result = run(ctl, args);
    free(ctl->full_name);
    ctl->full_name = NULL;
    return result;
}
