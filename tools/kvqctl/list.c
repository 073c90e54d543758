// SPDX-License-Identifier: Apache-2.0
// Lists, page by page: asks with each reply's cursor for the next one until there is none.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvqctl/table.h"

// What stands at an offset of a message; members of a type that the caller knows.
static void *at(const ProtobufCMessage *message, size_t offset)
{
    return (char *)(uintptr_t)message + offset;
}

// Appends a page's elements. False: out of memory.
static bool take(struct kvq__ctl_list *list, const struct kvq__ctl_kind *kind,
                 const ProtobufCMessage *page)
{
    size_t n = *(size_t *)at(page, kind->n);
    ProtobufCMessage **from = *(ProtobufCMessage ***)at(page, kind->elements);
    if (list->n + n > list->room) {
        size_t room = 2 * (list->n + n);
        ProtobufCMessage **more = realloc(list->elements, room * sizeof *more);
        if (!more)
            return false;
        list->elements = more;
        list->room = room;
    }
    for (size_t i = 0; i < n; i++)
        list->elements[list->n++] = from[i];
    list->truncated = *(protobuf_c_boolean *)at(page, kind->truncated);
    return true;
}

// Memory for one more reply, which stays as long as the list does. False: there is none.
static bool add_page(struct kvq__ctl_list *list, struct kvq_arena *arena)
{
    void **more = realloc(list->pages, (list->n_pages + 1) * sizeof *more);
    if (!more)
        return false;
    list->pages = more;
    void *memory = malloc(KVQ_WIRE_ARENA);
    if (!memory)
        return false;
    list->pages[list->n_pages++] = memory;
    kvq_arena_init(arena, memory, KVQ_WIRE_ARENA);
    return true;
}

static bool same(const Kvq__Cursor *a, const Kvq__Cursor *b)
{
    return a && a->namespace_ == b->namespace_ && a->id == b->id &&
           strcmp(a->remote_namespace, b->remote_namespace) == 0 &&
           strcmp(a->remote_name, b->remote_name) == 0;
}

static int out_of_memory(const struct kvq__ctl_list *list)
{
    fprintf(stderr, "kvqctl: no memory for a list of more than %zu elements\n", list->n);
    return KVQ_EXIT_FAILED;
}

int kvq__ctl_ask_list(struct kvq__ctl *ctl, Kvq__Request *request, Kvq__Cursor **cursor,
                      const struct kvq__ctl_kind *kind, struct kvq__ctl_list *list)
{
    struct kvq_arena arena;
    Kvq__Cursor *next = NULL;
    int result = KVQ_EXIT_OK;
    *list = (struct kvq__ctl_list){0};
    do {
        Kvq__Reply *reply;
        if (!add_page(list, &arena)) {
            result = out_of_memory(list);
            break;
        }
        *cursor = next;
        ctl->page = &arena;
        result = kvq__ctl_ask(ctl, request, kind->result, &reply);
        ctl->page = NULL;
        if (result)
            break;
        // Of the union of results all members are pointers to messages.
        const ProtobufCMessage *page = &reply->sessions->base;
        list->reply = list->reply ? list->reply : reply;
        if (!take(list, kind, page)) {
            result = out_of_memory(list);
            break;
        }
        next = *(Kvq__Cursor **)at(page, kind->next);
    } while (list->truncated && next && !same(*cursor, next));
    if (result)
        kvq__ctl_list_free(list);
    return result;
}

void kvq__ctl_list_free(struct kvq__ctl_list *list)
{
    for (size_t i = 0; i < list->n_pages; i++)
        free(list->pages[i]);
    free(list->pages);
    free(list->elements);
    *list = (struct kvq__ctl_list){0};
}

int kvq__ctl_list_end(struct kvq__ctl_list *list, const struct kvq__ctl_kind *kind)
{
    size_t n = list->n;
    bool truncated = list->truncated;
    kvq__ctl_list_free(list);
    if (!truncated)
        return KVQ_EXIT_OK;
    fflush(stdout);
    fprintf(stderr,
            "kvqctl: the list is not whole: the daemon told %zu %s, has more, and does not say how "
            "to ask for them; is it of an earlier release?%s%s\n",
            n, kind->what, *kind->remedy ? " Else " : "", kind->remedy);
    return KVQ_EXIT_FAILED;
}

static void say_none(const struct kvq__ctl *ctl, const struct kvq__ctl_table *table, size_t all)
{
    if (all > 0)
        printf("none of %zu %s passes the filters\n", all, table->what);
    else
        printf("%s\n", ctl->ns && table->of_namespace ? table->of_namespace : table->none);
}

int kvq__ctl_show_list(struct kvq__ctl *ctl, struct kvq__ctl_list *list,
                       const struct kvq__ctl_kind *kind, const struct kvq__ctl_table *table)
{
    struct kvq__ctl_view view;
    size_t all = list->n;
    int result = kvq__ctl_take_view(ctl, table, &view);
    if (result == KVQ_EXIT_OK && !ctl->csv && !ctl->columns)
        kvq__ctl_fade_columns(&view, list->elements, all);
    size_t n = result ? 0 : kvq__ctl_apply_view(&view, list->elements, all);
    if (result) // cannot be: it was checked before the daemon was asked
        fprintf(stderr, "kvqctl: the list was not printed\n");
    else if (ctl->json)
        kvq__ctl_print_json_array(list->elements, n);
    else if (ctl->csv)
        kvq__ctl_print_csv(&view, list->elements, n);
    else if (n == 0 && table->none)
        say_none(ctl, table, all);
    else
        kvq__ctl_print_table(&view, list->elements, n);
    int end = kvq__ctl_list_end(list, kind);
    return result ? result : end;
}
