// SPDX-License-Identifier: Apache-2.0
//
// Who may connect, and who has to go. libmicrohttpd waits for the next byte only, so a guest who
// sends a byte now and then would keep a place for ever. A connection ends here by being shut:
// libmicrohttpd then reads its end, and says that it is closed.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/http/internal.h"
#include "daemon/runtime/descriptors.h"

static const uint64_t patience_ns = KVQ__HTTP_IDLE_SECONDS * 1000000000ull;

static void shut(struct kvq__http_guest *guest)
{
    assert(!guest->ending && guest->fd >= 0);
    guest->ending = true;
    shutdown(guest->fd, SHUT_RDWR);
}

static bool is_late(const struct kvq__http_guest *guest, uint64_t now_ns)
{
    return now_ns >= guest->since_ns && now_ns - guest->since_ns >= patience_ns;
}

// Those without a whole request first, and of these who has been so for longest.
static bool goes_before(const struct kvq__http_guest *a, const struct kvq__http_guest *b)
{
    return a->asking != b->asking ? b->asking : a->since_ns < b->since_ns;
}

static bool displace_stranger(struct kvq__http_guests *guests, uint64_t now_ns)
{
    struct kvq__http_guest *guest, *found = NULL;
    LIST_FOREACH (guest, guests, link) {
        assert(now_ns >= guest->since_ns);
        if (guest->local || guest->ending || (guest->asking && !is_late(guest, now_ns)))
            continue;
        if (!found || goes_before(guest, found))
            found = guest;
    }
    if (found)
        shut(found);
    return found;
}

// Of the descriptors that the daemon keeps, monitors get a few, so that they see what goes on.
static uint32_t places(uint32_t free)
{
    return free > kvq__descriptors_kept() ? KVQ__HTTP_MOST
           : free >= KVQ__FILES_SPARE     ? KVQ__HTTP_RESERVED
                                          : 0;
}

int kvq__http_guest_check(struct kvq__http_guests *guests, const struct kvq__http_guest *guest,
                          enum kvq__role role, uint64_t now_ns, char *text)
{
    const struct kvq__http_guest *other;
    uint32_t own = 0, all = 0, free = kvq__descriptors_free(), most = places(free);
    bool local = guest->local;
    LIST_FOREACH (other, guests, link) {
        bool counts = other->local == local && !other->ending;
        assert(other != guest);
        all += counts;
        own += counts && other->peer.uid == guest->peer.uid;
    }
    if (!local || role == KVQ__ROLE_ADMIN ? all < most : kvq__share_allows(own, 1, all, most))
        return 0;
    if (!local && most > 0 && displace_stranger(guests, now_ns))
        return 0;
    if (most < KVQ__HTTP_MOST)
        snprintf(text, KVQ_TEXT_BYTES,
                 "kvqd has %u of %u descriptors left, which it keeps for itself; raise its "
                 "LimitNOFILE=",
                 free, kvq__descriptors_limit());
    else if (local)
        snprintf(text, KVQ_TEXT_BYTES, "user %u has %u of the %u connections, and all have %u",
                 guest->peer.uid, own, most, all);
    else
        snprintf(text, KVQ_TEXT_BYTES, "all %u connections have a request under way", all);
    return KVQ_E_LIMIT;
}

void kvq__http_guests_tick(struct kvq__http_guests *guests, uint64_t now_ns)
{
    struct kvq__http_guest *guest;
    LIST_FOREACH (guest, guests, link)
        if (!guest->asking && !guest->ending && is_late(guest, now_ns))
            shut(guest);
}

void kvq__http_guest_leave(struct kvq__http_guests *guests, const struct kvq__http_guest *guest)
{
    struct kvq__http_guest *one;
    LIST_FOREACH (one, guests, link)
        if (one == guest)
            break;
    if (!one)
        return;
    LIST_REMOVE(one, link);
    free(one);
}
