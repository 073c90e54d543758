// SPDX-License-Identifier: Apache-2.0
// See format_hint.h.
#include "proto/format_hint.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"
#include "proto/nearest.h"

// Whether the text is the name, or goes on behind it with one of these.
static bool begins_with(const char *text, const char *name, const char *behind)
{
    size_t n = strlen(name);
    return strncmp(text, name, n) == 0 && (!text[n] || strchr(behind, text[n]));
}

static bool is_known(const char *part)
{
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        if (begins_with(part, f->name, "-"))
            return true;
    return strncmp(part, "vecinfer-k", 10) == 0;
}

// The first part, of those that '+' joins, that no row of the table begins. False: there is none.
static bool find_unknown(const char *name, char part[KVQ_FORMAT_NAME])
{
    for (const char *at = name;; at++) {
        size_t length = strcspn(at, "+:@");
        snprintf(part, KVQ_FORMAT_NAME, "%.*s", (int)length, at);
        if (!is_known(part))
            return true;
        at += length;
        at += *at == '@' ? strcspn(at, "+:") : 0;
        if (*at != '+')
            return false;
    }
}

static void consider(const char *given, const char *name, const char **best)
{
    if (kvq_word_resembles(given, name) &&
        (!*best || kvq_word_distance(given, name) < kvq_word_distance(given, *best)))
        *best = name;
}

// By the letters in whatever case. NULL: none is near.
static const char *nearest(const char *part, const char *const *own, uint32_t n)
{
    const char *best = NULL;
    char given[KVQ_FORMAT_NAME];
    size_t i = 0;
    for (; part[i]; i++)
        given[i] = (char)tolower((unsigned char)part[i]);
    given[i] = 0;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        consider(given, f->name, &best);
    for (uint32_t o = 0; o < n; o++) {
        consider(given, own[o], &best);
        consider(part, own[o], &best);
    }
    return best;
}

// Appends what fits; else nothing. Whether it did.
static bool append(char *out, size_t room, const char *between, const char *word)
{
    size_t used = strlen(out), length = strlen(between) + strlen(word);
    if (used + length >= room)
        return false;
    snprintf(out + used, room - used, "%s%s", between, word);
    return true;
}

void kvq_format_choices(const char *const *own, uint32_t n, char *out, size_t room)
{
    static const char more[] = ", ..";
    const char *between = "";
    for (const char *const *name = kvq_recommended_formats; *name; name++, between = ", ")
        append(out, room, between, *name);
    for (uint32_t i = 0; i < n; i++)
        if (!append(out, room - sizeof more, i ? ", " : ", or of the configuration ", own[i])) {
            append(out, room, "", i ? more : "");
            return;
        }
}

void kvq_format_hint(const char *name, const char *const *own, uint32_t n, char *out, size_t room)
{
    char part[KVQ_FORMAT_NAME];
    const char *whole = NULL, *meant;
    out[0] = 0;
    for (uint32_t i = 0; i < n && !whole; i++)
        whole = begins_with(name, own[i], "-+:@") ? own[i] : NULL;
    if (!find_unknown(name, part) || (whole && begins_with(name, whole, "@")))
        return;
    if (whole) {
        snprintf(out, room, "; '%s' of the configuration takes nothing behind it", whole);
    } else if ((meant = nearest(part, own, n))) {
        snprintf(out, room, "; did you mean '%s'?", meant);
    } else {
        snprintf(out, room, "; try ");
        kvq_format_choices(own, n, out, room);
    }
}
