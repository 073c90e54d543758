// SPDX-License-Identifier: Apache-2.0
//
// See grammar.h. The lines are those of inih, which has 199 bytes for one, and says nothing of a
// section without keys.
#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "daemon/config/grammar.h"

enum { LONGEST_LINE = 5000, LONGEST_SECTION = 47, LONGEST_KEY = 63 };

static const char byte_order_mark[] = "\xef\xbb\xbf";

struct reader {
    kvq__ini_handler *handle;
    void *context;
    const char **what;
    int number; // of the line
    char section[LONGEST_SECTION + 1];
    char key[LONGEST_KEY + 1]; // of the line before; "": there is none to go on with
    char line[LONGEST_LINE + 1];
};

static char *without_blanks(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    for (char *end = text + strlen(text); end > text && isspace((unsigned char)end[-1]); end--)
        end[-1] = 0;
    return text;
}

// Cuts a comment off.
static void cut_comment(char *text)
{
    for (char *at = text; (at = strchr(at, ';')); at++)
        if (at > text && isspace((unsigned char)at[-1])) {
            *at = 0;
            return;
        }
}

static int read_header(struct reader *r, char *text)
{
    char *end = strchr(text, ']');
    if (!end)
        return r->number;
    *end = 0;
    *r->what = "text stands behind the ] of a section; put it on a line of its own";
    const char *rest = without_blanks(end + 1);
    if (*rest && *rest != ';')
        return r->number;
    *r->what = "a section's name is longer than 47 bytes; choose a shorter one";
    if (strlen(text) > LONGEST_SECTION)
        return r->number;
    memcpy(r->section, text, strlen(text) + 1);
    r->key[0] = 0;
    *r->what = NULL;
    return r->handle(r->context, r->section, NULL, NULL) ? 0 : r->number;
}

static int read_pair(struct reader *r, char *text)
{
    char *value = strpbrk(text, "=:");
    if (!value)
        return r->number;
    *value++ = 0;
    const char *key = without_blanks(text);
    snprintf(r->key, sizeof r->key, "%s", key);
    *r->what = NULL;
    return r->handle(r->context, r->section, key, without_blanks(value)) ? 0 : r->number;
}

// The line's number, if it is refused.
static int read_ini_line(struct reader *r, const char *line, size_t length)
{
    while (length && isspace((unsigned char)line[length - 1]))
        length--;
    size_t blanks = 0;
    while (blanks < length && isspace((unsigned char)line[blanks]))
        blanks++;
    if (blanks == length || strchr(";#", line[blanks]))
        return 0;
    *r->what =
        "a line is longer than 5000 bytes, which is more than any value may have; shorten it";
    if (length - blanks > LONGEST_LINE)
        return r->number;
    memcpy(r->line, line + blanks, length - blanks);
    r->line[length - blanks] = 0;
    cut_comment(r->line);
    *r->what = "neither `name = value` nor a [section]";
    if (r->key[0] && blanks) { // it goes on
        *r->what = NULL;
        return r->handle(r->context, r->section, r->key, without_blanks(r->line)) ? 0 : r->number;
    }
    return r->line[0] == '[' ? read_header(r, r->line + 1) : read_pair(r, r->line);
}

int kvq__ini_read(const char *contents, kvq__ini_handler *handle, void *context, const char **what)
{
    struct reader r = {.handle = handle, .context = context, .what = what, .number = 1};
    const char *at = contents;
    int refused = 0;
    assert(handle);
    if (strncmp(at, byte_order_mark, strlen(byte_order_mark)) == 0)
        at += strlen(byte_order_mark);
    for (; *at && refused == 0; r.number++) {
        size_t length = strcspn(at, "\n");
        refused = read_ini_line(&r, at, length);
        at += length + (at[length] == '\n');
    }
    return refused;
}
