// SPDX-License-Identifier: Apache-2.0
//
// The command line as tables: what kvqctl does, and the options it takes. Help, the reading of the
// command line and suggestions for misspelt words follow from the rows.
#ifndef KVQ_TOOLS_KVQCTL_COMMANDS_H
#define KVQ_TOOLS_KVQCTL_COMMANDS_H

#include <stdbool.h>
#include <stddef.h>

struct kvq__ctl;
struct kvq__ctl_table;

// Does a command. An exit status, with the complaint printed.
typedef int kvq__ctl_run(struct kvq__ctl *ctl, char **args);

struct kvq__ctl_command {
    const char *words[2];
    const char *heading;  // of the group that begins here in kvqctl --help; NULL: it goes on
    const char *argument; // its name, or several with blanks between, or NULL for none
    kvq__ctl_run *run;
    const char *about;
    const char *more;                   // for --help, or NULL
    bool repeats;                       // takes --watch
    const struct kvq__ctl_table *table; // of what it lists; NULL: it lists nothing
    const struct kvq__ctl_table *sorts; // what it shows among else, by --sort; NULL: see table
    unsigned places;                    // where the session is that NAME means; 0: it means none
    bool whole_name;                    // the beginning of a name does not do
    bool by_namespace;                  // takes --namespace, as all with a session's name do
    kvq__ctl_run *preview;              // says what it would take away; NULL: it takes nothing
};

extern const struct kvq__ctl_command kvq__ctl_commands[];
extern const size_t kvq__ctl_n_commands;

enum kvq__ctl_option_kind {
    KVQ__CTL_FLAG,     // bool
    KVQ__CTL_TEXT,     // const char *
    KVQ__CTL_TEXTS,    // struct kvq__ctl_texts: it may be given several times
    KVQ__CTL_INT,      // int
    KVQ__CTL_UNSIGNED, // unsigned
    KVQ__CTL_ULONG,    // unsigned long
    KVQ__CTL_REAL,     // double
    KVQ__CTL_LIMIT,    // of struct kvq__ctl_quota; `at` is its number there
    KVQ__CTL_HELP,
    KVQ__CTL_VERSION,
};

struct kvq__ctl_option {
    const char *name, *value; // value: what stands behind it; NULL: nothing
    enum kvq__ctl_option_kind kind;
    size_t at; // of its field in struct kvq__ctl
    double least, most;
    const char *must;  // be what, if a value can be wrong
    const char *about; // for --help; lines behind the first are indented there
    const char *of; // the commands that take it, "top, session move"; NULL: see the command's row
};

extern const struct kvq__ctl_option kvq__ctl_options[];
extern const size_t kvq__ctl_n_options;

// Runs the command. If it names a session by the beginning of one name alone, that one is meant.
int kvq__ctl_run_named(struct kvq__ctl *ctl, const struct kvq__ctl_command *command, char **args);

// Whether the command takes it, and not every command.
bool kvq__ctl_is_own_option(const struct kvq__ctl_option *o,
                            const struct kvq__ctl_command *command);

// What the command line said of help.
struct kvq__ctl_asked {
    bool help, version;
};

// Takes all options of the command line into ctl, and moves what is none behind them. An exit
// status, with the complaint printed. *first: where in argv the rest begins.
int kvq__ctl_take_options(struct kvq__ctl *ctl, int argc, char **argv, int *first,
                          struct kvq__ctl_asked *asked);

// Whether the command takes all options that were given. An exit status, with a complaint printed.
int kvq__ctl_check_options(const struct kvq__ctl *ctl, const struct kvq__ctl_command *command);

struct kvq__ctl_exit {
    int status;
    const char *about;
};

extern const struct kvq__ctl_exit kvq__ctl_exits[];
extern const size_t kvq__ctl_n_exits;

// The exit status for a status code of the daemon that is not 0.
int kvq__ctl_exit_of(int status);

// "session list", in one of a few static buffers.
const char *kvq__ctl_words(const struct kvq__ctl_command *command);
// Help of one command, of those that begin with a word, or (both NULL) of all; with their own
// options alone unless of all.
void kvq__ctl_print_help(const struct kvq__ctl_command *only, const char *word);
// Says how the command is written, and where to read more. KVQ_EXIT_USAGE.
int kvq__ctl_bad_command(const struct kvq__ctl_command *command, const char *what);
// Says what is wrong with the command line. KVQ_EXIT_USAGE.
int kvq__ctl_bad_usage(const char *what, const char *value);

#endif
