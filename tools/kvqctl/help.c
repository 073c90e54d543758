// SPDX-License-Identifier: Apache-2.0
// What kvqctl says of itself, out of the tables of commands and options.
#include <stdio.h>
#include <string.h>

#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

enum { COMMAND_WIDTH = 24, OPTION_WIDTH = 19, LINE_WIDTH = 92 };

const char *kvq__ctl_words(const struct kvq__ctl_command *command)
{
    static char buffers[4][64];
    static unsigned next;
    char *text = buffers[next++ % 4];
    snprintf(text, sizeof buffers[0], "%s%s%s", command->words[0], command->words[1] ? " " : "",
             command->words[1] ? command->words[1] : "");
    return text;
}

static void print_option(const struct kvq__ctl_option *o)
{
    char line[64];
    const char *about = o->about;
    snprintf(line, sizeof line, "--%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");
    printf("  %-*s %.*s\n", OPTION_WIDTH, line, (int)strcspn(about, "\n"), about);
    while (*(about += strcspn(about, "\n"))) {
        about++;
        printf("  %-*s %.*s\n", OPTION_WIDTH, "", (int)strcspn(about, "\n"), about);
    }
}

static bool is_meant(const struct kvq__ctl_command *c, const struct kvq__ctl_command *only,
                     const char *word)
{
    return only ? only == c : !word || strcmp(word, c->words[0]) == 0;
}

// Whether one of the commands that are meant takes it, and not every command.
static bool is_own(const struct kvq__ctl_option *o, const struct kvq__ctl_command *only,
                   const char *word)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (is_meant(&kvq__ctl_commands[i], only, word) &&
            kvq__ctl_is_own_option(o, &kvq__ctl_commands[i]))
            return true;
    return false;
}

static void print_options(const struct kvq__ctl_command *only, const char *word)
{
    bool all = !only && !word, any = all;
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        any = any || is_own(&kvq__ctl_options[i], only, word);
    printf("%s", any ? "Options:\n" : "");
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        if (all || is_own(&kvq__ctl_options[i], only, word))
            print_option(&kvq__ctl_options[i]);
}

// One line for what every command takes.
static void print_common(void)
{
    printf("All commands take");
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        if (!is_own(&kvq__ctl_options[i], NULL, NULL) && kvq__ctl_options[i].kind < KVQ__CTL_HELP)
            printf(" --%s", kvq__ctl_options[i].name);
    printf(": see kvqctl --help.\n");
}

static void print_exits(void)
{
    printf("Exit status:\n");
    for (size_t i = 0; i < kvq__ctl_n_exits; i++)
        printf("  %d  %s\n", kvq__ctl_exits[i].status, kvq__ctl_exits[i].about);
}

// Those that are shown by themselves come first, and then those that the option adds.
static void print_columns(const struct kvq__ctl_table *table, const char *option)
{
    for (int extra = 0; extra < 2; extra++) {
        size_t used = 0;
        for (size_t i = 0; i < table->n; i++) {
            const struct kvq__ctl_column *c = &table->columns[i];
            if (c->extra != (extra == 1))
                continue;
            if (used == 0)
                used = (size_t)(extra ? printf("With %s also:", option) : printf("Columns:"));
            else if (used + strlen(c->name) > LINE_WIDTH)
                used = (size_t)printf("\n   ") - 1;
            used += (size_t)printf(" %s", c->name);
        }
        printf("%s", used ? "\n" : "");
    }
    printf("\n");
}

// "session save NAME", in one of the buffers of kvq__ctl_text.
static const char *form_of(const struct kvq__ctl_command *c)
{
    return kvq__ctl_text("%s%s%s", kvq__ctl_words(c), c->argument ? " " : "",
                         c->argument ? c->argument : "");
}

// With its own options, as "kvqctl session save NAME [--again]".
static void print_usage(const struct kvq__ctl_command *command)
{
    size_t used = (size_t)printf("usage: kvqctl %s", form_of(command));
    for (size_t i = 0; i < kvq__ctl_n_options; i++) {
        const struct kvq__ctl_option *o = &kvq__ctl_options[i];
        if (!kvq__ctl_is_own_option(o, command))
            continue;
        const char *word =
            kvq__ctl_text("[--%s%s%s]", o->name, o->value ? " " : "", o->value ? o->value : "");
        if (used + 1 + strlen(word) > LINE_WIDTH)
            used = (size_t)printf("\n             ") - 1;
        used += (size_t)printf(" %s", word);
    }
    printf("\n\n%s\n\n", command->about);
}

static void print_commands(const char *word)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        if (!word && c->heading)
            printf("%s%s:\n", i ? "\n" : "", c->heading);
        if (is_meant(c, NULL, word))
            printf("  %-*s %s\n", COMMAND_WIDTH, form_of(c), c->about);
    }
    printf("\n");
}

void kvq__ctl_print_help(const struct kvq__ctl_command *only, const char *word)
{
    if (only) {
        print_usage(only);
    } else {
        printf("kvqctl %s: administers kvqd, the daemon that owns quantized KV caches\n\n"
               "usage: kvqctl [options] %s%sCOMMAND\n"
               "       kvqctl help [COMMAND]\n\n",
               KVQ_VERSION, word ? word : "", word ? " " : "");
        print_commands(word);
    }
    const char *more = only && only->more ? only->more : "";
    printf("%s%s", more, *more ? "\n" : "");
    if (only && only->table)
        print_columns(only->table, "--columns");
    else if (only && only->sorts)
        print_columns(only->sorts, "--sort");
    print_options(only, word);
    if (only || word)
        print_common();
    else
        print_exits();
}

int kvq__ctl_bad_command(const struct kvq__ctl_command *command, const char *what)
{
    fprintf(stderr, "kvqctl: %s; it is kvqctl %s\nkvqctl %s --help says more.\n", what,
            form_of(command), kvq__ctl_words(command));
    return KVQ_EXIT_USAGE;
}

int kvq__ctl_bad_usage(const char *what, const char *value)
{
    fprintf(stderr, "kvqctl: %s%s%s\nkvqctl --help lists the commands and options.\n", what,
            value ? " " : "", value ? kvq__ctl_clean(value) : "");
    return KVQ_EXIT_USAGE;
}
