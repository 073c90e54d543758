// SPDX-License-Identifier: Apache-2.0
// See nearest.h.
#include "proto/nearest.h"

#include <string.h>

enum { LONGEST = 63, FAR = 1000 };

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t kvq_word_distance(const char *a, const char *b)
{
    size_t rows[3][LONGEST + 1]; // of the letter before the last, of the last, of this one
    size_t n = strlen(a), m = strlen(b);
    if (n > LONGEST || m > LONGEST)
        return FAR;
    for (size_t j = 0; j <= m; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *now = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            now[j] = least(last[j - 1] + (a[i - 1] != b[j - 1]), least(last[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                now[j] = least(now[j], before[j - 2] + 1);
        }
    }
    return rows[n % 3][m];
}

bool kvq_word_resembles(const char *given, const char *name)
{
    size_t length = strlen(given);
    return kvq_word_distance(given, name) <= (length < 4 ? 1 : length / 3);
}
