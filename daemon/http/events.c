// SPDX-License-Identifier: Apache-2.0
//
// Events are kept as the text that is sent; the oldest one makes room.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/http/internal.h"
#include "proto/json.h"

void kvq__http_events_add(struct kvq__http_events *events, const Kvq__Event *event)
{
    cJSON *json = kvq_json_of_message(&event->base);
    cJSON_AddItemToObject(json, "number", kvq_json_of_whole(events->last + 1));
    char *text = json ? cJSON_PrintUnformatted(json) : NULL;
    cJSON_Delete(json);
    if (!text) // no memory: one event less
        return;
    struct kvq__http_text *kept = &events->kept[++events->last % KVQ__HTTP_EVENTS];
    free(kept->at);
    *kept = (struct kvq__http_text){text, strlen(text)};
}

struct kvq__http_text kvq__http_events_since(const struct kvq__http_events *events, uint64_t after)
{
    struct kvq__http_text text = {0};
    FILE *out = open_memstream(&text.at, &text.n);
    if (!out)
        return text;
    uint64_t first = events->last < KVQ__HTTP_EVENTS ? 1 : events->last - KVQ__HTTP_EVENTS + 1;
    if (after >= first && after < events->last)
        first = after + 1;
    fprintf(out, "{\"last\":%llu,\"events\":[", (unsigned long long)events->last);
    for (uint64_t n = first; n <= events->last && after != events->last; n++) {
        assert(events->kept[n % KVQ__HTTP_EVENTS].at);
        fprintf(out, "%s%s", n > first ? ",\n" : "", events->kept[n % KVQ__HTTP_EVENTS].at);
    }
    fputs("]}\n", out);
    if (fclose(out) != 0) {
        free(text.at);
        text = (struct kvq__http_text){0};
    }
    return text;
}

void kvq__http_events_free(struct kvq__http_events *events)
{
    for (uint32_t i = 0; i < KVQ__HTTP_EVENTS; i++)
        free(events->kept[i].at);
}
