// SPDX-License-Identifier: Apache-2.0
// kvqctl completion: scripts for shells, out of the tables of commands and options, and the names
// that these scripts ask for.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

enum { PATIENCE_MS = 300 }; // who presses a key does not wait longer for names

// ---- Names ----

// One a line: no name has a line's end in it.
static void print_texts(const struct kvq__ctl_list *list, const char *field)
{
    const struct kvq__ctl_column name = {.field = field};
    const char *last = "";
    for (size_t i = 0; i < list->n; i++) {
        const char *text = kvq__ctl_value_of(&name, list->elements[i]).text;
        // Shards of one session follow each other, and a name may look like an option.
        if (*text && *text != '-' && strcmp(text, last) != 0)
            printf("%s\n", text);
        last = text;
    }
}

static void print_names(struct kvq__ctl *ctl, const char *field,
                        int (*ask)(struct kvq__ctl *ctl, struct kvq__ctl_list *list))
{
    struct kvq__ctl_list list;
    if (ask(ctl, &list) != KVQ_EXIT_OK)
        return;
    print_texts(&list, field);
    kvq__ctl_list_free(&list);
}

static void print_clients(struct kvq__ctl *ctl)
{
    struct kvq__ctl_list list;
    if (kvq__ctl_ask_clients(ctl, &list) != KVQ_EXIT_OK)
        return;
    for (size_t i = 0; i < list.n; i++)
        printf("%" PRIu64 "\n", ((const Kvq__Client *)list.elements[i])->id);
    kvq__ctl_list_free(&list);
}

static void print_config_names(struct kvq__ctl *ctl)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__GetConfig command = KVQ__GET_CONFIG__INIT;
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_GET_CONFIG;
    request.get_config = &command;
    if (kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_CONFIG, &reply) != KVQ_EXIT_OK)
        return;
    for (size_t i = 0; i < reply->config->n_options; i++)
        printf("%s\n", reply->config->options[i]->name);
}

static bool takes_config_name(const struct kvq__ctl_command *command)
{
    return command->run == kvq__ctl_config_get || command->run == kvq__ctl_config_set;
}

// What the command's first argument can be, as far as the daemon knows it.
static int print_candidates(struct kvq__ctl *ctl, const struct kvq__ctl_command *command)
{
    unsigned places = command->places;
    if (!ctl->timeout_given)
        ctl->timeout_ms = PATIENCE_MS;
    ctl->timeout_given = true;
    ctl->quiet = true;
    if (places & KVQ__CTL_MEMORY)
        print_names(ctl, "name", kvq__ctl_ask_sessions);
    if (places & KVQ__CTL_SAVED)
        print_names(ctl, "name", kvq__ctl_ask_saved);
    if (places & KVQ__CTL_REMOTE)
        print_names(ctl, "name", kvq__ctl_ask_remote);
    if (command->argument && strcmp(command->argument, "NS") == 0)
        print_names(ctl, "namespace", kvq__ctl_ask_quotas);
    if (command->run == kvq__ctl_client_kick)
        print_clients(ctl);
    if (takes_config_name(command))
        print_config_names(ctl);
    return KVQ_EXIT_OK;
}

// ---- Words ----

// Whether a row is the first one that begins with its word.
static bool is_first(size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (strcmp(kvq__ctl_commands[j].words[0], kvq__ctl_commands[i].words[0]) == 0)
            return false;
    return true;
}

static void print_first_words(const char *between)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (is_first(i))
            printf("%s%s", kvq__ctl_commands[i].words[0], between);
    printf("help");
}

static void print_second_words(const char *first)
{
    const char *before = "";
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        if (strcmp(c->words[0], first) != 0 || !c->words[1])
            continue;
        printf("%s%s", before, c->words[1]);
        before = " ";
    }
}

static void print_options(bool with_value, const char *between)
{
    const char *before = "";
    for (size_t i = 0; i < kvq__ctl_n_options; i++) {
        if (with_value && !kvq__ctl_options[i].value)
            continue;
        printf("%s--%s", before, kvq__ctl_options[i].name);
        before = between;
    }
}

// Whether some command takes it alone, or only some.
static bool has_owner(const struct kvq__ctl_option *o)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (kvq__ctl_is_own_option(o, &kvq__ctl_commands[i]))
            return true;
    return false;
}

// Whether it is the option of the row's command, or of one that begins with the same word.
static bool is_option_of(const struct kvq__ctl_option *o, size_t row, bool group)
{
    const char *word = kvq__ctl_commands[row].words[0];
    if (!group)
        return kvq__ctl_is_own_option(o, &kvq__ctl_commands[row]);
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (strcmp(kvq__ctl_commands[i].words[0], word) == 0 &&
            kvq__ctl_is_own_option(o, &kvq__ctl_commands[i]))
            return true;
    return false;
}

static void print_options_of(size_t row, bool group)
{
    const char *words = kvq__ctl_words(&kvq__ctl_commands[row]);
    if (group)
        printf("    %s) options='", kvq__ctl_commands[row].words[0]);
    else
        printf("    '%s' | '%s '*) options='", words, words);
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        if (is_option_of(&kvq__ctl_options[i], row, group))
            printf(" --%s", kvq__ctl_options[i].name);
    printf("' ;;\n");
}

// The options that belong to some commands alone, or those that every command takes.
static void print_owned(bool owned)
{
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        if (has_owner(&kvq__ctl_options[i]) == owned)
            printf(" --%s", kvq__ctl_options[i].name);
}

// Options that the command typed so far takes; before there is one, all.
static void print_own_options(void)
{
    printf("    local options='");
    print_owned(false);
    printf("'\n    local common=$options\n    case $line in\n    '') options='");
    print_owned(true);
    printf("' ;;\n");
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        if (kvq__ctl_commands[i].words[1] && is_first(i))
            print_options_of(i, true);
        print_options_of(i, false);
    }
    printf("    *) options='' ;;\n    esac\n    options=$common$options\n");
}

static void print_kinds(const char *between)
{
    for (size_t i = 0; kvq__ctl_event_kinds[i]; i++)
        printf("%s%s", i ? between : "", kvq__ctl_event_kinds[i]);
}

static void print_formats(void)
{
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        printf("%s%s", f == kvq_formats ? "" : " ", f->name);
}

// What can stand behind some options, for the case in the script that has others' values.
static void print_known_values(void)
{
    printf("    [[ $last == --kind ]] && columns='");
    print_kinds(" ");
    printf("'\n    [[ $last == --format ]] && columns='");
    print_formats();
    printf("'\n");
}

// "'session list') columns='namespace name ..' ;;" for every list, and for top.
static void print_columns(void)
{
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *command = &kvq__ctl_commands[i];
        const struct kvq__ctl_table *table = command->table ? command->table : command->sorts;
        if (!table)
            continue;
        printf("    '%s') columns='", kvq__ctl_words(command));
        for (size_t c = 0; c < table->n; c++)
            printf("%s%s", c ? " " : "", table->columns[c].name);
        printf("' ;;\n");
    }
}

// Where the words before are those of a command or a group: what can follow.
static void print_followers(void)
{
    printf("    '') follow='");
    print_first_words(" ");
    printf("' ;;\n    help) follow='");
    print_first_words(" ");
    printf("' ;;\n");
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        if (is_first(i) && c->words[1]) {
            printf("    %s | 'help %s') follow='", c->words[0], c->words[0]);
            print_second_words(c->words[0]);
            printf("' ;;\n");
        }
        if (c->run == kvq__ctl_completion)
            printf("    %s) follow='bash zsh fish' ;;\n", c->words[0]);
        else if (c->argument && strncmp(c->argument, "FILE", 4) == 0)
            printf("    '%s') files=1 ;;\n", kvq__ctl_words(c));
        else if (c->argument)
            printf("    '%s') names=1 ;;\n", kvq__ctl_words(c));
        if (c->argument && strstr(c->argument, " PLACE"))
            printf("    '%s '*) follow=host ;;\n", kvq__ctl_words(c));
        if (c->argument && strstr(c->argument, " FILE"))
            printf("    '%s '*) files=1 ;;\n", kvq__ctl_words(c));
    }
}

// ---- Scripts ----

// Bash and zsh share the reading of the line: what was typed before the word under the cursor, in
// the array `before`.
static void print_reading(void)
{
    printf("    local word line='' follow='' columns='' names='' files='' last=''\n"
           "    local -a daemon=()\n"
           "    for word in \"${before[@]}\"; do\n"
           "        case $word in\n"
           "        --runtime-dir=* | --connect=* | --key=* | --namespace=* | --from=*) "
           "daemon+=(\"$word\"); continue ;;\n"
           "        --*=*) continue ;;\n"
           "        esac\n"
           "        case $last in\n"
           "        --runtime-dir | --connect | --key | --namespace | --from) daemon+=(\"$last\" "
           "\"$word\") ;;\n"
           "        esac\n"
           "        case $last in\n"
           "        ");
    print_options(true, " | ");
    printf(") last='' ; continue ;;\n"
           "        esac\n"
           "        last=$word\n"
           "        case $word in\n"
           "        -*) ;;\n"
           "        *) line=${line:+$line }$word ;;\n"
           "        esac\n"
           "    done\n"
           "    case $line in\n");
    print_columns();
    printf("    esac\n"
           "    case $line in\n");
    print_followers();
    printf("    esac\n");
    print_own_options();
    print_known_values();
}

// Bash takes words apart at : = and @, also in names. What stands together in the line is one word;
// of it bash replaces what is behind the last of these characters, and an @ as well.
static void print_bash_words(void)
{
    printf("    local IFS=$' \\t\\n' name piece rest=$COMP_LINE cur cut\n"
           "    local -a before=()\n"
           "    for piece in \"${COMP_WORDS[@]:0:COMP_CWORD+1}\"; do\n"
           "        if [[ ${before[0]} && $rest != [[:blank:]]* && $rest ]]; then\n"
           "            before[-1]+=$piece\n"
           "        else\n"
           "            before+=(\"$piece\") rest=${rest#\"${rest%%%%[![:blank:]]*}\"}\n"
           "        fi\n"
           "        rest=${rest#\"$piece\"}\n"
           "    done\n"
           "    cur=${before[-1]} cut=${cur%%\"${cur##*[:=@]}\"}\n"
           "    cut=${cut%%@}\n"
           "    before=(\"${before[@]:1:${#before[@]}-2}\")\n"
           "    case $cur in\n"
           "    --*=*) before+=(\"${cur%%%%=*}\") cur=${cur#*=} cut=${cut#*=} ;;\n"
           "    esac\n");
}

static void print_bash(void)
{
    printf("# bash completion for kvqctl; kvqctl completion bash prints it.\n"
           "_kvqctl()\n"
           "{\n");
    print_bash_words();
    print_reading();
    printf(
        "    COMPREPLY=()\n"
        "    case $last in\n"
        "    --runtime-dir | --offline) compopt -o filenames; IFS=$'\\n'\n"
        "        COMPREPLY=($(compgen -d -- \"$cur\")); return ;;\n"
        "    --model | --key) compopt -o filenames; IFS=$'\\n'\n"
        "        COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n"
        "    --namespace | --from) line='quota get' names=1 files='' ;;\n"
        "    --columns | --kind | --format) compopt -o nospace; name=${cur%%\"${cur##*,}\"}\n"
        "        COMPREPLY=($(compgen -P \"$name\" -W \"$columns\" -- \"${cur##*,}\")); return ;;\n"
        "    --sort | --filter)\n"
        "        COMPREPLY=($(compgen -W \"$columns ${columns:+-${columns// / -}}\" -- \"$cur\"))\n"
        "        return ;;\n"
        "    ");
    print_options(true, " | ");
    printf(
        ") return ;;\n"
        "    esac\n"
        "    if [[ $cur == -* ]]; then\n"
        "        COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
        "    elif [[ $files ]]; then\n"
        "        compopt -o filenames; IFS=$'\\n'\n"
        "        COMPREPLY=($(compgen -f -- \"$cur\"))\n"
        "    elif [[ $names ]]; then\n"
        "        while IFS= read -r name; do\n"
        "            printf -v rest %%q \"$name\"\n"
        "            [[ $name == \"$cur\"* || $rest == \"$cur\"* ]] &&\n"
        "                COMPREPLY+=(\"${rest#\"$cut\"}\")\n"
        "        done < <(\"${COMP_WORDS[0]}\" \"${daemon[@]}\" completion \"$line\" 2>/dev/null)\n"
        "    else\n"
        "        COMPREPLY=($(compgen -W \"$follow\" -- \"$cur\"))\n"
        "    fi\n"
        "}\n"
        "complete -F _kvqctl kvqctl\n");
}

static void print_zsh(void)
{
    printf("#compdef kvqctl\n"
           "# zsh completion for kvqctl; kvqctl completion zsh prints it.\n"
           "_kvqctl()\n"
           "{\n"
           "    local program=$words[1]\n"
           "    local -a before=(\"${(@)words[2,CURRENT-1]}\") found\n"
           "    _kvqctl_line\n"
           "}\n"
           "_kvqctl_line()\n"
           "{\n");
    print_reading();
    printf("    case $last in\n"
           "    --runtime-dir | --offline) _files -/; return ;;\n"
           "    --namespace | --from) line='quota get' names=1 files='' ;;\n"
           "    --model | --key) _files; return ;;\n"
           "    --columns | --kind | --format) compset -P '*,'; compadd -S '' -- ${=columns}; "
           "return ;;\n"
           "    --sort | --filter) compadd -- ${=columns} -${^${=columns}}; return ;;\n"
           "    ");
    print_options(true, " | ");
    printf(") return ;;\n"
           "    esac\n"
           "    if [[ $PREFIX == -* ]]; then\n"
           "        compadd -- ${=options}\n"
           "    elif [[ -n $files ]]; then\n"
           "        _files\n"
           "    elif [[ -n $names ]]; then\n"
           "        found=(\"${(@f)$(\"$program\" \"${daemon[@]}\" completion \"$line\" "
           "2>/dev/null)}\")\n"
           "        compadd -- \"${(@)found:#}\"\n"
           "    else\n"
           "        compadd -- ${=follow}\n"
           "    fi\n"
           "}\n"
           "if [[ $funcstack[1] == _kvqctl ]]; then\n"
           "    _kvqctl \"$@\"\n"
           "else\n"
           "    compdef _kvqctl kvqctl\n"
           "fi\n");
}

// In single quotes, as fish reads them.
static void print_fish_text(const char *text)
{
    putchar('\'');
    for (; *text && *text != '\n'; text++)
        printf(*text == '\'' || *text == '\\' ? "\\%c" : "%c", *text);
    putchar('\'');
}

static void print_fish_option(const struct kvq__ctl_option *o)
{
    bool path = o->value && (strcmp(o->value, "DIR") == 0 || strcmp(o->value, "FILE") == 0);
    printf("complete -c kvqctl -l %s%s", o->name, path ? " -r -F" : o->value ? " -x" : "");
    if (has_owner(o)) {
        printf(" -n '__kvqctl_takes");
        for (size_t i = 0; i < kvq__ctl_n_commands; i++)
            if (kvq__ctl_is_own_option(o, &kvq__ctl_commands[i]))
                printf(" \"%s\"", kvq__ctl_words(&kvq__ctl_commands[i]));
        printf("'");
    }
    if (strcmp(o->name, "namespace") == 0 || strcmp(o->name, "from") == 0) {
        printf(" -a '(__kvqctl_names quota get)'");
    } else if (strcmp(o->name, "format") == 0) {
        printf(" -a '(__kvqctl_listed ");
        print_formats();
        printf(")'");
    } else if (strcmp(o->name, "kind") == 0) {
        printf(" -a '(__kvqctl_listed ");
        print_kinds(" ");
        printf(")'");
    }
    printf(" -d ");
    print_fish_text(o->about);
    printf("\n");
}

static void print_fish(void)
{
    printf("# fish completion for kvqctl; kvqctl completion fish prints it.\n"
           "function __kvqctl_words\n"
           "    set -l line\n"
           "    set -l skip 0\n"
           "    for word in (commandline -opc)[2..-1]\n"
           "        if test $skip = 1\n"
           "            set skip 0\n"
           "        else if contains -- $word ");
    print_options(true, " ");
    printf("\n"
           "            set skip 1\n"
           "        else if not string match -q -- '-*' $word\n"
           "            set -a line $word\n"
           "        end\n"
           "    end\n"
           "    string join ' ' -- $line\n"
           "end\n"
           "function __kvqctl_line\n"
           "    test (__kvqctl_words | string collect -a) = \"$argv\"\n"
           "end\n"
           "function __kvqctl_takes\n" // whether the line may become one of these commands
           "    set -l line (__kvqctl_words | string collect -a)\n"
           "    test -z \"$line\"; and return\n"
           "    for command in $argv\n"
           "        string match -q -- \"$line *\" \"$command \"; and return\n"
           "        string match -q -- \"$command *\" \"$line \"; and return\n"
           "    end\n"
           "    return 1\n"
           "end\n"
           "function __kvqctl_listed\n" // K,K: what is given, and each of the others behind it
           "    set -l given (string replace -r '[^,]*$' '' -- (commandline -ct))\n"
           "    printf '%%s\\n' $given$argv\n"
           "end\n"
           "function __kvqctl_names\n"
           "    set -l words (commandline -opc)\n"
           "    set -l daemon\n"
           "    for i in (seq 2 (count $words))\n"
           "        set -q words[(math $i + 1)]; or break\n"
           "        if contains -- $words[$i] --runtime-dir --connect --key --namespace --from\n"
           "            set -a daemon $words[$i] $words[(math $i + 1)]\n"
           "        end\n"
           "    end\n"
           "    $words[1] $daemon completion \"$argv\" 2>/dev/null\n"
           "end\n"
           "complete -c kvqctl -f\n");
    for (size_t i = 0; i < kvq__ctl_n_options; i++)
        print_fish_option(&kvq__ctl_options[i]);
    for (size_t i = 0; i < kvq__ctl_n_commands; i++) {
        const struct kvq__ctl_command *c = &kvq__ctl_commands[i];
        if (is_first(i))
            printf("complete -c kvqctl -n '__kvqctl_line' -a %s\n", c->words[0]);
        if (c->words[1]) {
            printf("complete -c kvqctl -n '__kvqctl_line %s' -a %s -d ", c->words[0], c->words[1]);
            print_fish_text(c->about);
            printf("\n");
        }
        if (c->run == kvq__ctl_completion)
            printf("complete -c kvqctl -n '__kvqctl_line %s' -a 'bash zsh fish'\n", c->words[0]);
        else if (c->argument && strncmp(c->argument, "FILE", 4) == 0)
            printf("complete -c kvqctl -n '__kvqctl_line %s' -F\n", kvq__ctl_words(c));
        else if (c->argument)
            printf("complete -c kvqctl -n '__kvqctl_line %s' -a '(__kvqctl_names %s)'\n",
                   kvq__ctl_words(c), kvq__ctl_words(c));
    }
}

// ---- The command ----

int kvq__ctl_completion(struct kvq__ctl *ctl, char **args)
{
    static const struct {
        const char *name;
        void (*print)(void);
    } shells[] = {{"bash", print_bash}, {"zsh", print_zsh}, {"fish", print_fish}};
    for (size_t i = 0; i < sizeof shells / sizeof *shells; i++) {
        if (strcmp(args[0], shells[i].name) == 0) {
            shells[i].print();
            return KVQ_EXIT_OK;
        }
    }
    for (size_t i = 0; i < kvq__ctl_n_commands; i++)
        if (strcmp(args[0], kvq__ctl_words(&kvq__ctl_commands[i])) == 0)
            return print_candidates(ctl, &kvq__ctl_commands[i]);
    return kvq__ctl_bad_usage("completion is for bash, zsh or fish, not for",
                              kvq__ctl_clean(args[0]));
}
