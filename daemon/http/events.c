// SPDX-License-Identifier: Apache-2.0
//
// The last events, as JSON.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/http/internal.h"
#include "daemon/runtime/history.h"
#include "proto/json.h"

static void write_event(FILE *out, const struct kvq__history *history, uint64_t number)
{
    uint8_t memory[16 * KVQ__EVENT_BYTES];
    struct kvq_arena arena;
    kvq_arena_init(&arena, memory, sizeof memory);
    const Kvq__Event *event = kvq__history_get(history, number, &arena);
    assert(event);
    cJSON *json = kvq_json_of_message(&event->base);
    char *text = json ? cJSON_PrintUnformatted(json) : NULL;
    fputs(text ? text : "{}", out); // no memory: one event less
    cJSON_free(text);
    cJSON_Delete(json);
}

struct kvq__http_text kvq__http_events_since(const struct kvq__history *history, uint64_t after)
{
    struct kvq__http_text text = {0};
    FILE *out = open_memstream(&text.at, &text.n);
    if (!out)
        return text;
    uint64_t first = kvq__history_first(history, after > history->last ? 0 : after);
    fprintf(out, "{\"last\":%llu,\"events\":[", (unsigned long long)history->last);
    for (uint64_t n = first; n <= history->last; n = kvq__history_first(history, n)) {
        fputs(n > first ? ",\n" : "", out);
        write_event(out, history, n);
    }
    fputs("]}\n", out);
    if (fclose(out) != 0) {
        free(text.at);
        text = (struct kvq__http_text){0};
    }
    return text;
}
