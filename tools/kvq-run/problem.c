// SPDX-License-Identifier: Apache-2.0
//
// One sentence of failure.
#include "tools/kvq-run/problem.h"

#include <stdarg.h>
#include <stdio.h>

int problem_set(struct problem *p, int exit_code, const char *format, ...)
{
    if (p->exit_code)
        return -1;
    p->exit_code = exit_code;
    va_list args;
    va_start(args, format);
    vsnprintf(p->text, sizeof p->text, format, args);
    va_end(args);
    return -1;
}
