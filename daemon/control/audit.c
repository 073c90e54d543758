// SPDX-License-Identifier: Apache-2.0
//
// See audit.h. The request is told as JSON, by its own description, so that a new command and a new
// field need no line here.
#include "daemon/control/audit.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/json.h"
#include "proto/status.h"

enum { MOST_TEXT = 640 }; // of a request, in a line of KVQ_LOG_LINE

#define READS(name) [KVQ__REQUEST__COMMAND_##name] = true

// Commands that change nothing. What is not named here is told of.
static const bool reads[] = {
    READS(_NOT_SET),      READS(SESSION_INFO), READS(ASK_MOVE),      READS(LIST_PREFIXES),
    READS(PING),          READS(STATUS),       READS(LIST_SESSIONS), READS(LIST_CLIENTS),
    READS(DOCTOR),        READS(LIST_FORMATS), READS(LIST_SAVED),    READS(LIST_QUOTAS),
    READS(LIST_REMOTE),   READS(ASK_TRANSFER), READS(REMOTE_STATUS), READS(GET_CONFIG),
    READS(LOOKUP_PREFIX),
};

static bool only_reads(const Kvq__Request *request)
{
    size_t command = (size_t)request->command_case;
    if (request->command_case == KVQ__REQUEST__COMMAND_STORAGE)
        return request->storage->action == KVQ__STORAGE_ACTION__STORAGE_STATUS;
    return command < sizeof reads / sizeof *reads && reads[command];
}

void kvq__audit(struct kvq_log_budget *budget, const struct kvq__peer *peer,
                const Kvq__Request *request, int status)
{
    char quoted[MOST_TEXT];
    assert(status <= 0);
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(
        &kvq__request__descriptor, (unsigned)request->command_case);
    if (only_reads(request) || !field)
        return;
    // All commands are members of one union.
    cJSON *object = kvq_json_of_message((const ProtobufCMessage *)request->hello);
    char *text = cJSON_PrintUnformatted(object);
    kvq__log_quote(quoted, sizeof quoted, text ? text : "");
    if (peer->admin)
        kvq__log(KVQ_LOG_INFO, "audit", "uid=%u pid=%u command=%s status=%s request=%s", peer->uid,
                 peer->pid, field->name, kvq_status_name(status), quoted);
    else
        kvq__log_client(budget, KVQ_LOG_INFO, "audit",
                        "uid=%u pid=%u command=%s status=%s request=%s", peer->uid, peer->pid,
                        field->name, kvq_status_name(status), quoted);
    cJSON_free(text);
    cJSON_Delete(object);
}
