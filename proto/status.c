// SPDX-License-Identifier: Apache-2.0
//
// Texts and names of the status codes, from the one list in status.h.
#include "proto/status.h"

const char *kvq_status_text(int code)
{
    switch (code) {
#define X(name, value, text)                                                                       \
    case value:                                                                                    \
        return text;
        KVQ_STATUS_LIST(X)
#undef X
    default:
        return "unknown status";
    }
}

const char *kvq_status_name(int code)
{
    switch (code) {
#define X(name, value, text)                                                                       \
    case value:                                                                                    \
        return #name;
        KVQ_STATUS_LIST(X)
#undef X
    default:
        return "E_UNKNOWN";
    }
}
