// SPDX-License-Identifier: Apache-2.0
//
// What config.c, file.c and text.c share: the table of options and its types.
#ifndef KVQ_DAEMON_CONFIG_INTERNAL_H
#define KVQ_DAEMON_CONFIG_INTERNAL_H

#include "daemon/config/config.h"
#include "daemon/config/grammar.h"

enum kvq__option_type {
    KVQ_OPTION_TEXT,
    KVQ_OPTION_NUMBER,
    KVQ_OPTION_SIZE,
    KVQ_OPTION_MODE,
    KVQ_OPTION_WORD,
    KVQ_OPTION_IDS,
};

// When a new value takes effect.
enum kvq__option_when {
    KVQ_OPTION_LIVE = 1, // while the daemon runs
    KVQ_OPTION_RESTART,  // when it is started again
};

struct kvq__option {
    const char *name;
    size_t offset, size; // of the field in struct kvq_config
    enum kvq__option_type type;
    const char *argument; // its kind, for --help
    enum kvq__option_when when;
    const char *alias; // name for people, if not the field's
    uint64_t initial, min, max;
    const char *initial_text;
    const char *const *words;
    const char *help;
};

extern const struct kvq__option kvq__options[]; // ended by a row without a name

const char *kvq__option_name(const struct kvq__option *option);
const struct kvq__option *kvq__option_find(const char *name); // NULL if unknown
// The option that an unknown name may have been meant for; NULL: none is like it.
const char *kvq__option_nearest(const char *name);
bool kvq__same_name(const char *a, const char *b);

// Checks and stores a value. `where` stands before the complaint: a flag, variable or file:line.
int kvq__option_set(struct kvq_config *config, const struct kvq__option *option,
                    enum kvq_config_source source, const char *where, const char *value,
                    char *text);

int kvq__parse_ids(const char *where, const char *name, const char *value,
                   struct kvq_config_ids *ids, char *text);

// A header [format NAME], [key NAME]: from there on it is in the configuration.
int kvq__config_format_begin(struct kvq_config *config, const char *name, char *text);
int kvq__config_key_begin(struct kvq_config *config, const char *name, char *text);
// A line of a section "format NAME". Refusals have no place in front, as those of a handler.
int kvq__config_format_line(struct kvq_config *config, const char *section, const char *name,
                            const char *value, char *text);
// After a file's last line: composes its formats, from number `first` on. On failure *failed is the
// section's NAME.
int kvq__config_formats_end(struct kvq_config *config, uint32_t first, const char **failed,
                            char *text);

// A line of a section "key NAME"; set_here[KVQ_MAX_KEYS] has a bit for each key that the file has
// set. Refusals have no place in front.
int kvq__config_key_line(struct kvq_config *config, const char *section, const char *name,
                         const char *value, uint8_t *set_here, char *text);
// Whether the options of a remote store go together. See kvq__jobs_remote_open as well.
int kvq__config_check_remote(const struct kvq_config *config, char *text);
// Of all files together.
int kvq__config_check_keys(const struct kvq_config *config, char *text);
// The keys of a section "key NAME", from 0 on (NULL: there are no more), and what it has of them.
const char *kvq__config_key_key(unsigned key);
void kvq__config_key_value(char *out, size_t size, const struct kvq_config_key *k, unsigned key);

// Reads one file; source_file as in kvq__config_parse.
int kvq__config_read_file(struct kvq_config *config, const char *path, const char *source_file,
                          char *text);
// Reads config->file, and then those of conf.d beside it.
int kvq__config_read_files(struct kvq_config *config, char *text);

// One flag of the command line: an option of the table, or a special one without.
struct kvq__flag {
    char name[64]; // as given, e.g. "--pool-bytes"
    const struct kvq__option *option;
    const char *value;
};
int kvq__flag_next(int argc, char *const *argv, int *at, struct kvq__flag *flag, char *text);
int kvq__flag_special(struct kvq_config *config, const struct kvq__flag *flag, char *text);

// Where option number `option` has its value from: a word, or conf.d/NAME.
const char *kvq__source_name(const struct kvq_config *config, size_t option, char *out,
                             size_t size);
// The option's value, and its default, as the file has them.
void kvq__option_value(char *out, size_t size, const struct kvq_config *config,
                       const struct kvq__option *option);
void kvq__option_initial(char *out, size_t size, const struct kvq__option *option);
// The keys of a namespace, from 0 on (NULL: there are no more), and what it has of them.
const char *kvq__namespace_key(unsigned key);
void kvq__namespace_value(char *out, size_t size, const struct kvq_config *config,
                          const struct kvq_config_namespace *ns, unsigned key);
// A format's section as the file has it.
enum { KVQ_FORMAT_SECTION = 8192 };
void kvq__format_section(char *out, size_t size, const struct kvq_config *config, uint32_t index);

// A number as its type is written: 64mb, 0750, 12.
void kvq__size_text(char *out, size_t size, uint64_t value, enum kvq__option_type type);

#endif
