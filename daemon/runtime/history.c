// SPDX-License-Identifier: Apache-2.0
//
// See history.h.
#include "daemon/runtime/history.h"

#include <assert.h>

#include "proto/status.h"

void kvq__history_add(struct kvq__history *history, Kvq__Event *event)
{
    uint8_t memory[4 * KVQ__EVENT_BYTES];
    struct kvq_arena arena;
    size_t length = 0, at = ++history->last % KVQ__HISTORY_EVENTS;
    // Texts may be cut within a character, or hold what was foreign.
    kvq_arena_init(&arena, memory, sizeof memory);
    event->number = history->last;
    event->namespace_ = kvq_arena_text(&arena, event->namespace_);
    event->session = kvq_arena_text(&arena, event->session);
    event->text = kvq_arena_text(&arena, event->text);
    int error = kvq_event_pack(event, history->kept[at].packed, KVQ__EVENT_BYTES, &length);
    assert(error == 0 && !arena.full); // texts of an event are bounded (runtime/events.c)
    (void)error;
    history->kept[at].bytes = (uint16_t)length;
}

void kvq__history_lose(struct kvq__history *history, uint32_t count)
{
    uint64_t begin = history->last + 1;
    history->last += count;
    assert(history->last >= begin);
    if (count > KVQ__HISTORY_EVENTS)
        begin = history->last - KVQ__HISTORY_EVENTS + 1;
    for (uint64_t number = begin; number <= history->last; number++)
        history->kept[number % KVQ__HISTORY_EVENTS].bytes = 0;
}

uint64_t kvq__history_first(const struct kvq__history *history, uint64_t after)
{
    uint64_t oldest =
        history->last < KVQ__HISTORY_EVENTS ? 1 : history->last - KVQ__HISTORY_EVENTS + 1;
    if (after >= history->last)
        return history->last + 1;
    uint64_t number = after < oldest ? oldest : after + 1;
    while (number <= history->last && history->kept[number % KVQ__HISTORY_EVENTS].bytes == 0)
        number++;
    return number;
}

Kvq__Event *kvq__history_get(const struct kvq__history *history, uint64_t number,
                             struct kvq_arena *arena)
{
    char text[KVQ_TEXT_BYTES];
    Kvq__Event *event;
    size_t at = number % KVQ__HISTORY_EVENTS;
    assert(number > 0 && number <= history->last && history->last - number < KVQ__HISTORY_EVENTS);
    assert(history->kept[at].bytes > 0);
    int error =
        kvq_event_unpack(history->kept[at].packed, history->kept[at].bytes, arena, &event, text);
    assert(error == 0 || error == KVQ_E_LIMIT);
    return error ? NULL : event;
}
