// SPDX-License-Identifier: Apache-2.0
//
// The grammar that the configuration and the file of limits set at run time (store/quota_file.c)
// share. Thread-safe: every function touches only its arguments.
#ifndef KVQ_DAEMON_CONFIG_GRAMMAR_H
#define KVQ_DAEMON_CONFIG_GRAMMAR_H

#include <stdbool.h>
#include <stdint.h>

// A number of bytes, as "64mb". `where` and `name` stand before the complaint. KVQ_E_INVALID.
int kvq__parse_size(const char *where, const char *name, const char *value, uint64_t *bytes,
                    char *text);

// Writes "where: ..." into text and returns KVQ_E_INVALID.
__attribute__((format(printf, 3, 4))) int kvq__config_refuse(char *text, const char *where,
                                                             const char *format, ...);

// Is told of each [section] (key and value NULL), and of each `key = value` there; section "" comes
// before the first header. A line that begins with a blank goes on with the key before. False: the
// line is refused, and the file is read no further.
typedef bool kvq__ini_handler(void *context, const char *section, const char *key,
                              const char *value);
// Reads a file's lines. # and ; begin comments, behind a value ; alone and after a blank. Returns
// the number of the first line that is refused, with *what is wrong, or NULL where the handler
// refused it; 0: there is none.
int kvq__ini_read(const char *contents, kvq__ini_handler *handle, void *context, const char **what);
// Whether a name can be a namespace's, in a file.
bool kvq__config_is_namespace(const char *name);

#endif
