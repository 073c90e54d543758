// SPDX-License-Identifier: Apache-2.0
// kvqctl top: the daemon's status and its largest sessions, anew every few seconds, with the
// rates between two looks. On a terminal it takes the other screen and keys; else it just prints.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvqctl/screen.h"
#include "tools/kvqctl/table.h"

enum { PLAIN_ROWS = 20 };

// What is compared between two looks.
struct look {
    uint64_t uptime_ms, steps, attends, appended;
};

static struct look look_of(const Kvq__StatusReply *s)
{
    return (struct look){s->uptime_ms, kvq__ctl_counter(s, "steps"), kvq__ctl_counter(s, "attends"),
                         kvq__ctl_counter(s, "appended_tokens")};
}

static double rate(uint64_t now, uint64_t before, uint64_t ms)
{
    return ms && now >= before ? (double)(now - before) * 1000.0 / (double)ms : 0;
}

static void print_evictions(const Kvq__StatusReply *s)
{
    uint64_t gone = kvq__ctl_counter(s, "parked_room") + kvq__ctl_counter(s, "parked_quota") +
                    kvq__ctl_counter(s, "parked_idle") + kvq__ctl_counter(s, "demoted");
    uint64_t back = kvq__ctl_counter(s, "fetched") + kvq__ctl_counter(s, "promoted");
    printf("evicted %" PRIu64 "   came back %" PRIu64 "   on disk %" PRIu64 "   demoted %" PRIu64
           "   waiting %" PRIu64 "\n",
           gone, back, kvq__ctl_counter(s, "offloaded_now"), kvq__ctl_counter(s, "demoted_now"),
           kvq__ctl_counter(s, "waiting_for_room_now"));
}

static void print_head(const Kvq__StatusReply *s, const struct look *before)
{
    struct look now = look_of(s);
    uint64_t ms = now.uptime_ms - before->uptime_ms;
    double share = s->pool_bytes ? 100.0 * (double)s->pool_used_bytes / (double)s->pool_bytes : 0;
    printf("kvqd %s  pid %" PRIu64 "  up %s  %s  workers %" PRIu32 "%s\n",
           kvq__ctl_clean(s->version), s->pid, kvq__ctl_duration(s->uptime_ms),
           kvq__ctl_clean(s->isa), s->workers, s->draining ? "  shutting down" : "");
    printf("memory %s of %s (%.1f%%)   sessions %" PRIu32 "   clients %" PRIu32 "   tokens %" PRIu64
           "\n",
           kvq__ctl_bytes(s->pool_used_bytes), kvq__ctl_bytes(s->pool_bytes), share, s->sessions,
           s->clients, s->tokens);
    printf("steps/s %.1f   attentions/s %.1f   tokens/s %.1f   refused %" PRIu64 "\n",
           rate(now.steps, before->steps, ms), rate(now.attends, before->attends, ms),
           rate(now.appended, before->appended, ms), kvq__ctl_counter(s, "refused_requests"));
    print_evictions(s);
    printf("\n");
}

// One look: both lists, and what the look before it counted.
struct seen {
    struct kvq__ctl_list status, sessions;
    struct look before;
    bool any;
};

static void forget(struct seen *seen)
{
    if (seen->any) {
        kvq__ctl_list_free(&seen->status);
        kvq__ctl_list_free(&seen->sessions);
    }
    seen->any = false;
}

static int look(struct kvq__ctl *ctl, struct seen *seen)
{
    if (seen->any)
        seen->before = look_of(kvq__ctl_status_of(&seen->status));
    forget(seen);
    int result = kvq__ctl_ask_status(ctl, &seen->status);
    if (result)
        return result;
    result = kvq__ctl_ask_sessions(ctl, &seen->sessions);
    seen->any = result == KVQ_EXIT_OK;
    if (result)
        kvq__ctl_list_free(&seen->status);
    return result;
}

static bool shows(const struct kvq__ctl_view *view, const struct kvq__ctl_column *column)
{
    for (size_t i = 0; i < view->n_columns; i++)
        if (view->columns[i] == column)
            return true;
    return false;
}

// Sorted as --sort says, else by memory, the largest on top. What it is sorted by is shown; returns
// the column that is only shown for that, or NULL.
static const struct kvq__ctl_column *begin_view(const struct kvq__ctl *ctl,
                                                struct kvq__ctl_view *view)
{
    const struct kvq__ctl sorted = {.sort = ctl->sort ? ctl->sort : "-memory"};
    kvq__ctl_take_view(&sorted, &kvq__ctl_sessions, view);
    if (shows(view, view->sort))
        return NULL;
    view->columns[view->n_columns++] = view->sort;
    return view->sort;
}

// ---- Where output is no terminal ----

// An exit status: whether it could be printed.
static int print_plain(const struct kvq__ctl *ctl, const struct kvq__ctl_view *view,
                       struct seen *seen)
{
    struct kvq__ctl_list *list = &seen->sessions;
    const Kvq__StatusReply *s = kvq__ctl_status_of(&seen->status);
    size_t n = kvq__ctl_apply_view(view, list->elements, list->n);
    if (ctl->json) {
        kvq__ctl_print_json_line(&s->base, list->elements, n);
    } else {
        print_head(s, &seen->before);
        kvq__ctl_print_table(view, list->elements, n < PLAIN_ROWS ? n : PLAIN_ROWS);
        if (list->truncated)
            printf("(of the first %zu sessions; there are more)\n", list->n);
    }
    return kvq__ctl_flush() ? KVQ_EXIT_OK : KVQ_EXIT_FAILED;
}

static int top_plain(struct kvq__ctl *ctl)
{
    struct kvq__ctl_view view;
    struct seen seen = {0};
    int result = KVQ_EXIT_OK;
    begin_view(ctl, &view);
    for (unsigned long i = 0; result == KVQ_EXIT_OK; i++) {
        result = look(ctl, &seen);
        if (result == KVQ_EXIT_OK)
            result = print_plain(ctl, &view, &seen);
        if (ctl->count && i + 1 >= ctl->count)
            break;
        if (result == KVQ_EXIT_OK && kvq__ctl_wait(ctl, ctl->interval))
            break;
    }
    forget(&seen);
    return result;
}

// ---- On a terminal ----

struct top {
    struct kvq__ctl *ctl;
    struct kvq__screen screen;
    struct kvq__ctl_view view;
    const struct kvq__ctl_column *added; // the last one while it is what is sorted by; NULL: none
    struct seen seen;
    size_t first; // of the sessions, that is shown on top
    char *text;   // what there is to show
    const char **lines;
    size_t n_lines, n_head; // the head's stay where they are
};

static int width_of(const struct kvq__ctl_view *view)
{
    int width = -1;
    for (size_t i = 0; i < view->n_columns; i++)
        width += abs(view->columns[i]->width) + (view->columns[i]->apart ? 2 : 1);
    return width;
}

// Without the columns farthest right that the terminal has no room for; the one that sessions are
// sorted by stays, and so do their names. A name that is too long is cut.
static struct kvq__ctl_view fitting_view(const struct top *t)
{
    struct kvq__ctl_view view = t->view;
    for (size_t i = view.n_columns; i-- > 0 && width_of(&view) > t->screen.columns;) {
        if (view.columns[i] == view.sort || strcmp(view.columns[i]->name, "name") == 0)
            continue;
        view.n_columns--;
        memmove(view.columns + i, view.columns + i + 1,
                (view.n_columns - i) * sizeof *view.columns);
    }
    view.most = t->screen.columns;
    return view;
}

// All of it as text, lines ended by NUL. False: out of memory.
static bool write_text(struct top *t)
{
    const struct kvq__ctl_view view = fitting_view(t);
    FILE *real = stdout;
    size_t size;
    free(t->text);
    t->text = NULL;
    stdout = open_memstream(&t->text, &size);
    if (stdout) {
        struct kvq__ctl_list *list = &t->seen.sessions;
        print_head(kvq__ctl_status_of(&t->seen.status), &t->seen.before);
        size_t n = kvq__ctl_apply_view(&view, list->elements, list->n);
        kvq__ctl_print_table(&view, list->elements, n);
        fclose(stdout);
    }
    stdout = real;
    return t->text != NULL;
}

static bool split_text(struct top *t)
{
    size_t n = 0;
    for (const char *at = t->text; *at; at++)
        n += *at == '\n';
    free(t->lines);
    t->lines = calloc(n + 1, sizeof *t->lines);
    if (!t->lines)
        return false;
    char *at = t->text;
    for (t->n_lines = 0; t->n_lines < n; t->n_lines++) {
        t->lines[t->n_lines] = at;
        at += strcspn(at, "\n");
        *at++ = 0;
    }
    t->n_head = n - t->seen.sessions.n; // with the headings of the columns
    return true;
}

// How many sessions there is room for, beside the head and the last line.
static size_t room(const struct top *t)
{
    size_t taken = t->n_head + 1, rows = (size_t)t->screen.rows;
    return rows > taken ? rows - taken : 0;
}

static void keep_within(struct top *t)
{
    size_t n = t->seen.sessions.n, fits = room(t);
    size_t last = n > fits ? n - fits : 0;
    t->first = t->first > last ? last : t->first;
}

// The head as far as there is room, sessions, and what can be done in the last line.
static void draw(struct top *t)
{
    keep_within(t);
    size_t n = t->seen.sessions.n, fits = room(t), rows = (size_t)t->screen.rows;
    size_t shown = n - t->first < fits ? n - t->first : fits;
    size_t head = t->n_head < rows ? t->n_head : rows;
    const char **lines = calloc(head + shown + 1, sizeof *lines);
    if (!lines)
        return;
    memcpy(lines, t->lines, head * sizeof *lines);
    memcpy(lines + head, t->lines + t->n_head + t->first, shown * sizeof *lines);
    lines[head + shown] =
        kvq__ctl_text("%zu to %zu of %zu by %s, %s first   q: quit  s: sort  r: reverse",
                      shown ? t->first + 1 : 0, t->first + shown, n, t->view.sort->name,
                      t->view.descending ? "largest" : "smallest");
    kvq__screen_draw(&t->screen, lines, head + shown + 1);
    free(lines);
}

static void sort_by_next(struct top *t)
{
    struct kvq__ctl_view *view = &t->view;
    size_t i = 0, stay = view->n_columns - (view->sort == t->added);
    while (i < stay && view->columns[i] != view->sort)
        i++;
    i = (i + 1) % (stay + (t->added != NULL)); // the one that was added comes last
    view->columns[stay] = t->added;
    view->n_columns = stay + (i == stay);
    view->sort = view->columns[i];
}

// Moves, or sorts anew. False: the user wants an end.
static bool obey(struct top *t, enum kvq__screen_news news, char letter)
{
    size_t page = room(t) ? room(t) : 1;
    switch (news) {
    case KVQ__SCREEN_UP:
        t->first -= t->first > 0;
        break;
    case KVQ__SCREEN_DOWN:
        t->first++;
        break;
    case KVQ__SCREEN_PAGE_UP:
        t->first -= t->first < page ? t->first : page;
        break;
    case KVQ__SCREEN_PAGE_DOWN:
        t->first += page;
        break;
    case KVQ__SCREEN_HOME:
        t->first = 0;
        break;
    case KVQ__SCREEN_END:
        t->first = t->seen.sessions.n;
        break;
    case KVQ__SCREEN_LETTER:
        if (letter == 's')
            sort_by_next(t);
        if (letter == 'r')
            t->view.descending = !t->view.descending;
        if (letter == 's' || letter == 'r')
            return write_text(t) && split_text(t);
        return letter != 'q';
    case KVQ__SCREEN_SIZE:
        return write_text(t) && split_text(t); // other columns may fit
    default:
        break;
    }
    return true;
}

// Shows one look until it is time for the next one. False: the user wants an end.
static bool show(struct top *t)
{
    int64_t until = kvq__screen_now() + (int64_t)(t->ctl->interval * 1000);
    for (;;) {
        char letter = 0;
        draw(t);
        enum kvq__screen_news news = kvq__screen_wait(&t->screen, t->ctl->stop_fd, until, &letter);
        if (news == KVQ__SCREEN_TIME)
            return true;
        if (news == KVQ__SCREEN_STOP || !obey(t, news, letter))
            return false;
    }
}

static int look_again_and_again(struct top *t)
{
    int result = KVQ_EXIT_OK;
    for (unsigned long i = 0; result == KVQ_EXIT_OK; i++) {
        result = look(t->ctl, &t->seen);
        if (result)
            break;
        if (!write_text(t) || !split_text(t)) {
            fprintf(stderr, "kvqctl: out of memory\n");
            result = KVQ_EXIT_FAILED;
            break;
        }
        if ((t->ctl->count && i + 1 >= t->ctl->count) || !show(t))
            break;
    }
    return result;
}

// Complaints wait until the terminal is what it was: on the other screen nobody would read them.
static int top_on_screen(struct kvq__ctl *ctl)
{
    struct top t = {.ctl = ctl};
    char *complaint = NULL;
    size_t size;
    FILE *real = stderr, *held = open_memstream(&complaint, &size);
    int error = held ? kvq__screen_open(&t.screen) : -1;
    if (error) {
        fprintf(stderr, "kvqctl: the terminal cannot be used; kvqctl top | cat does without\n");
        return KVQ_EXIT_FAILED;
    }
    t.added = begin_view(ctl, &t.view);
    stderr = held;
    int result = look_again_and_again(&t);
    stderr = real;
    fclose(held);
    kvq__screen_close(&t.screen);
    fputs(complaint ? complaint : "", stderr);
    free(complaint);
    free(t.text);
    free(t.lines);
    forget(&t.seen);
    return result;
}

// So many looks and no more are for reading afterwards.
static bool has_screen(const struct kvq__ctl *ctl)
{
    const char *term = getenv("TERM");
    return !ctl->json && !ctl->count && isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0;
}

int kvq__ctl_top(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    int result = kvq__ctl_catch_stop(ctl);
    if (result == KVQ_EXIT_OK)
        result = has_screen(ctl) ? top_on_screen(ctl) : top_plain(ctl);
    return result == KVQ_EXIT_STOPPED ? KVQ_EXIT_OK : result;
}
