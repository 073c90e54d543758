// SPDX-License-Identifier: Apache-2.0
//
// The door where HTTP was left out of the build (KVQ_HTTP=OFF).
#include <stddef.h>
#include <stdio.h>

#include "daemon/http/http.h"

int kvq__http_open(struct kvq__server *server, struct kvq__http **http, char *text)
{
    *http = NULL;
    if (!server->config.http || !kvq__config_was_given(&server->config, "http"))
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "http is set, and this kvqd was built without it (KVQ_HTTP=OFF); say http = no");
    return KVQ_E_UNSUPPORTED;
}

void kvq__http_end(struct kvq__http *http)
{
    (void)http;
}

bool kvq__http_idle(const struct kvq__http *http)
{
    (void)http;
    return true;
}

void kvq__http_free(struct kvq__http **http)
{
    *http = NULL;
}
