// SPDX-License-Identifier: Apache-2.0
// kvqctl: administers kvqd from the command line. This file finds the command that the words name
// and runs it; commands and options stand in tables (commands.c, options.c).
#include <locale.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/nearest.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"
#include "tools/kvqctl/transport.h"

// Words in a command's `argument`.
static int count_arguments(const struct kvq__ctl_command *c)
{
    int n = c->argument ? 1 : 0;
    for (const char *at = c->argument; at && *at; at++)
        n += *at == ' ';
    return n;
}

// The command that the words name, with *used of them taken; NULL if there is none.
static const struct kvq__ctl_command *find_command(char **words, int n, int *used)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        *used = c->words[1] ? 2 : 1;
        if (n >= *used && strcmp(words[0], c->words[0]) == 0 &&
            (!c->words[1] || strcmp(words[1], c->words[1]) == 0))
            return c;
    }
    return NULL;
}

// Whether commands begin with the word, as "storage status" with "storage".
static bool begins_commands(const char *word)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (kvq__ctl_commands[i].words[1] && strcmp(word, kvq__ctl_commands[i].words[0]) == 0)
            return true;
    return false;
}

// What was probably meant: the words of a command or of a group of them. NULL: nothing is near.
static const char *nearest_command(char **words, int n)
{
    static char nearest[64];
    bool group = begins_commands(words[0]); // so the second word is the wrong one
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        bool two = n > 1 && c->words[1];
        char given[64];
        snprintf(given, sizeof given, "%s%s%s", words[0], two ? " " : "", two ? words[1] : "");
        const char *meant = two ? kvq__ctl_words(c) : c->words[0];
        size_t distance = kvq_word_distance(given, meant);
        if (!kvq_word_resembles(given, meant) || distance >= least || (!two && group))
            continue;
        least = distance;
        snprintf(nearest, sizeof nearest, "%s", meant);
    }
    return least < SIZE_MAX ? nearest : NULL;
}

static int no_command(char **words, int n)
{
    if (n == 0)
        return kvq__ctl_bad_usage("what to do?", NULL);
    bool group = begins_commands(words[0]);
    if (group && n == 1) {
        fprintf(stderr, "kvqctl: there has to be more behind \"%s\"\n", words[0]);
    } else {
        const char *meant = nearest_command(words, n);
        fprintf(stderr, "kvqctl: there is no command '%s%s%s'", kvq__ctl_clean(words[0]),
                n > 1 ? " " : "", n > 1 ? kvq__ctl_clean(words[1]) : "");
        if (meant)
            fprintf(stderr, "; did you mean '%s'?", meant);
        fprintf(stderr, "\n");
    }
    fprintf(stderr, "kvqctl %s%s--help lists what there is.\n", group ? words[0] : "",
            group ? " " : "");
    return KVQ_EXIT_USAGE;
}

// In a file or a pipe answers stand below each other: a line says when each was asked for.
static void print_time(bool first)
{
    char text[32];
    struct tm tm;
    time_t now = time(NULL);
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", localtime_r(&now, &tm));
    printf("%s%s\n", first ? "" : "\n", text);
}

// Runs it again and again until the user ends it. A terminal shows the newest answer alone.
static int watch(struct kvq__ctl *ctl, const struct kvq__ctl_command *command, char **args)
{
    int result = kvq__ctl_catch_stop(ctl);
    bool terminal = isatty(STDOUT_FILENO);
    for (bool first = true; result == KVQ_EXIT_OK; first = false) {
        if (terminal)
            printf("\033[H\033[J");
        else if (!ctl->json && !ctl->csv)
            print_time(first);
        else if (!first && ctl->csv)
            printf("\n");
        result = kvq__ctl_run_named(ctl, command, args);
        if (!kvq__ctl_flush() && result == KVQ_EXIT_OK)
            result = KVQ_EXIT_FAILED;
        if (result == KVQ_EXIT_OK && kvq__ctl_wait(ctl, ctl->watch))
            break;
    }
    return result == KVQ_EXIT_STOPPED ? KVQ_EXIT_OK : result;
}

// Options that only lists take, and top one of them, before the daemon is asked. An exit status.
static int check_view(const struct kvq__ctl *ctl, const struct kvq__ctl_command *command)
{
    struct kvq__ctl_view view;
    const struct kvq__ctl_table *table = command->table;
    const char *given = ctl->columns     ? "--columns"
                        : ctl->filters.n ? "--filter"
                        : ctl->csv       ? "--csv"
                        : ctl->sort      ? "--sort"
                                         : NULL;
    if (!given)
        return KVQ_EXIT_OK;
    if (!table && strcmp(given, "--sort") == 0)
        table = command->sorts;
    if (!table)
        return kvq__ctl_bad_usage(kvq__ctl_text("%s is for lists, not for", given),
                                  kvq__ctl_words(command));
    if (ctl->json && (ctl->csv || ctl->columns))
        return kvq__ctl_bad_usage("--json prints all fields as JSON; leave out", given);
    return kvq__ctl_take_view(ctl, table, &view);
}

// More or fewer words behind the command than it takes.
static int bad_count(const struct kvq__ctl_command *command, char **args, int n)
{
    int takes = count_arguments(command);
    const char *missing = command->argument;
    if (n > takes)
        return kvq__ctl_bad_command(command,
                                    kvq__ctl_text("'%s' is too much", kvq__ctl_clean(args[takes])));
    for (int i = 0; i < n; i++)
        missing += strcspn(missing, " ") + 1;
    return kvq__ctl_bad_command(
        command, kvq__ctl_text("%.*s is missing", (int)strcspn(missing, " "), missing));
}

// "help session list" is "session list --help".
static int run_command(struct kvq__ctl *ctl, char **words, int n, bool help)
{
    int used = 0;
    if (n > 0 && strcmp(words[0], "help") == 0)
        return run_command(ctl, words + 1, n - 1, true);
    const struct kvq__ctl_command *command = n > 0 ? find_command(words, n, &used) : NULL;
    bool group = n == 1 && !command && begins_commands(words[0]);
    if (help && (command || group || n == 0)) {
        kvq__ctl_print_help(command, group ? words[0] : NULL);
        return KVQ_EXIT_OK;
    }
    if (!command)
        return no_command(words, n);
    bool optional = command->argument && command->argument[0] == '[';
    if (n - used != count_arguments(command) && !(optional && n == used))
        return bad_count(command, words + used, n - used);
    if (ctl->watch > 0 && !command->repeats)
        return kvq__ctl_bad_usage("--watch is for status and lists, not for",
                                  kvq__ctl_words(command));
    if (ctl->dry_run && !command->preview)
        return kvq__ctl_bad_usage("--dry-run is for commands that take something away, not for",
                                  kvq__ctl_words(command));
    int result = kvq__ctl_check_options(ctl, command);
    result = result ? result : check_view(ctl, command);
    if (result)
        return result;
    return ctl->watch > 0 ? watch(ctl, command, words + used)
                          : kvq__ctl_run_named(ctl, command, words + used);
}

// Of the environment; NULL: it is not set, or empty.
static const char *set_variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

int main(int argc, char **argv)
{
    struct kvq__ctl ctl = {.interval = 2, .shard = -1, .stop_fd = -1};
    struct kvq__ctl_asked asked = {0};
    setlocale(LC_CTYPE, "C.UTF-8"); // for the width of characters alone
    int first, result = kvq__ctl_take_options(&ctl, argc, argv, &first, &asked);
    if (result)
        return result;
    if (asked.version) {
        printf("kvqctl %s\n", KVQ_VERSION);
        return kvq__ctl_flush() ? KVQ_EXIT_OK : KVQ_EXIT_FAILED;
    }
    if (!ctl.connect && !ctl.runtime_dir) // what the command line says comes first
        ctl.connect = set_variable("KVQ_CONNECT");
    if (!ctl.key_file)
        ctl.key_file = set_variable("KVQ_KEY");
    ctl.told_dir = ctl.runtime_dir                   ? "--runtime-dir"
                   : set_variable("KVQ_RUNTIME_DIR") ? "$KVQ_RUNTIME_DIR"
                                                     : NULL;
    ctl.runtime_dir = kvq__ctl_runtime_dir(ctl.runtime_dir);
    result = run_command(&ctl, argv + first, argc - first, asked.help);
    kvq__transport_close(&ctl.transport);
    return kvq__ctl_flush() ? result : KVQ_EXIT_FAILED;
}
