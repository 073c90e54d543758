// SPDX-License-Identifier: Apache-2.0
//
// See activity.h.
#include "daemon/core/session/activity.h"

#include "daemon/core/session/client.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

static bool is_packed_on_stream(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (!kvq__work_stream_ended(s->layers[i].pack_stream, s->layers[i].pack_number))
            return true;
    return false;
}

uint32_t kvq__session_uses(const struct kvq__session *s, uint32_t of)
{
    uint32_t own = (s->core->packing.packer.session == s) + (s->restore != NULL);
    uint32_t uses = 0;
    assert(of != 0 && s->refs >= own);
    uses |= LIST_EMPTY(&s->handles) ? 0 : KVQ__USE_OPEN;
    uses |= kvq__in_step(s) ? KVQ__USE_STEP : 0;
    uses |= s->in_step.committing ? KVQ__USE_COMMIT : 0;
    uses |= s->refs > own || kvq__is_read(s) || s->entries.tail ? KVQ__USE_REQUEST : 0;
    uses |= own ? KVQ__USE_OWN : 0;
    uses |= s->exclusive ? KVQ__USE_CHANGE : 0;
    uses |= LIST_EMPTY(&s->tables) ? 0 : KVQ__USE_TABLE;
    uses |= s->move ? KVQ__USE_MOVE : 0;
    uses |= s->park ? KVQ__USE_PARK : 0;
    uses |= s->restore ? KVQ__USE_RESTORE : 0;
    uses |= s->n_loading ? KVQ__USE_LOADING : 0;
    uses |= kvq__is_fetching(s) ? KVQ__USE_FETCH : 0;
    uses |= kvq__is_unsaved(s) ? KVQ__USE_UNSAVED : 0;
    uses &= of;
    if (of & KVQ__USE_STREAM && is_packed_on_stream(s))
        uses |= KVQ__USE_STREAM;
    return uses;
}
