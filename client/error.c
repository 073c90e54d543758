// SPDX-License-Identifier: Apache-2.0
//
// The calling thread's error text, and the texts of codes.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define STRING_OF(x) #x
#define STRING(x)    STRING_OF(x)

static _Thread_local char text[KVQ__TEXT_BYTES];

const char *kvq_strerror(int code)
{
    return kvq_status_text(code);
}

const char *kvq_error_text(void)
{
    return text;
}

const char *kvq_version(void)
{
    return STRING(KVQ_VERSION_MAJOR) "." STRING(KVQ_VERSION_MINOR) "." STRING(KVQ_VERSION_PATCH);
}

int kvq__set_error(int code, const char *format, ...)
{
    va_list args;
    assert(code != KVQ_OK);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return code;
}

int kvq__set_error_errno(const char *format, ...)
{
    int error = errno;
    char reason[128];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, ": %s", strerror_r(error, reason, sizeof reason));
    return KVQ_E_SYSTEM;
}
