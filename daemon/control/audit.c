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

void kvq__audit(struct kvq_log_budget *budget, const struct kvq__asker *asker,
                const Kvq__Request *request, int status)
{
    char quoted[MOST_TEXT], who[256];
    assert(status <= 0);
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(
        &kvq__request__descriptor, (unsigned)request->command_case);
    if (kvq__role_needed(request) == KVQ__ROLE_READ || !field)
        return;
    bool allowed = asker->role >= kvq__role_needed(request);
    if (!allowed && !kvq__log_allows(budget, KVQ_LOG_ALWAYS)) // before the work of the text
        return;
    // All commands are members of one union.
    cJSON *object = kvq_json_of_message((const ProtobufCMessage *)request->hello);
    char *text = cJSON_PrintUnformatted(object);
    kvq__log_quote(quoted, sizeof quoted, text ? text : "");
    kvq__asker_text(asker, who, sizeof who);
    if (allowed)
        kvq__log(KVQ_LOG_ALWAYS, "audit", "%s role=%s command=%s status=%s request=%s", who,
                 kvq__role_name(asker->role), field->name, kvq_status_name(status), quoted);
    else
        kvq__log_client(budget, KVQ_LOG_ALWAYS, "audit",
                        "%s role=%s command=%s status=%s request=%s", who,
                        kvq__role_name(asker->role), field->name, kvq_status_name(status), quoted);
    cJSON_free(text);
    cJSON_Delete(object);
}

void kvq__audit_question(struct kvq_log_budget *budget, const struct kvq__asker *asker,
                         const Kvq__Request *request, int status)
{
    char who[256];
    assert(status <= 0);
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(
        &kvq__request__descriptor, (unsigned)request->command_case);
    if (kvq__log_has(KVQ_LOG_DEBUG))
        kvq__log_client(budget, KVQ_LOG_DEBUG, "control_asked", "%s role=%s command=%s status=%s",
                        kvq__asker_text(asker, who, sizeof who), kvq__role_name(asker->role),
                        field ? field->name : "unknown", kvq_status_name(status));
}
