// SPDX-License-Identifier: Apache-2.0
// Numbers with units, as people type them.
#include <string.h>

#include "tools/kvqctl/table.h"

struct unit {
    const char *name;
    uint64_t times;
};

static const struct unit sizes[] = {
    {"", 1},
    {"b", 1},
    {"k", 1ull << 10},
    {"kb", 1ull << 10},
    {"kib", 1ull << 10},
    {"m", 1ull << 20},
    {"mb", 1ull << 20},
    {"mib", 1ull << 20},
    {"g", 1ull << 30},
    {"gb", 1ull << 30},
    {"gib", 1ull << 30},
    {"t", 1ull << 40},
    {"tb", 1ull << 40},
    {"tib", 1ull << 40},
    {NULL, 0},
};

// A bare number is none: who types 60 means seconds or minutes, and not the milliseconds of fields.
static const struct unit durations[] = {
    {"ms", 1},      {"s", 1000},     {"m", 60000},       {"min", 60000},
    {"h", 3600000}, {"d", 86400000}, {"days", 86400000}, {NULL, 0},
};

// Case does not matter.
static bool same_word(const char *a, const char *b)
{
    while (*a && *b && (*a | 32) == *b) {
        a++;
        b++;
    }
    return !*a && !*b;
}

static bool parse(const char *text, const struct unit *units, uint64_t *value)
{
    size_t digits = strspn(text, "0123456789");
    const char *unit = text + digits + strspn(text + digits, " ");
    *value = 0;
    if (digits == 0 || digits > 18)
        return false;
    for (size_t i = 0; i < digits; i++)
        *value = 10 * *value + (uint64_t)(text[i] - '0');
    while (units->name && !same_word(unit, units->name))
        units++;
    if (!units->name || *value > UINT64_MAX / units->times)
        return false;
    *value *= units->times;
    return true;
}

bool kvq__ctl_parse_size(const char *text, uint64_t *bytes)
{
    return parse(text, sizes, bytes);
}

bool kvq__ctl_parse_duration(const char *text, uint64_t *ms)
{
    return parse(text, durations, ms);
}
