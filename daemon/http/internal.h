// SPDX-License-Identifier: Apache-2.0
//
// What the files of this room share.
//
//   http.c     listening, connections, and which path is whose (the table of routes)
//   guests.c   who may connect, and who has to go
//   ask.c      what the core knows, asked for on the poller's thread, one request at a time
//   metrics.c  Prometheus' and OpenMetrics' text
//   storage.c  the store in figures, for the page
//   events.c   the last events, kept for those who ask
#ifndef KVQ_DAEMON_HTTP_INTERNAL_H
#define KVQ_DAEMON_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <stdio.h>
#include <sys/queue.h>

#include "daemon/http/http.h"
#include "daemon/runtime/listen.h"
#include "daemon/store/store.h"

enum {
    KVQ__HTTP_MOST = 32,          // connections to each of the two sockets,
    KVQ__HTTP_RESERVED = 4,       // while only descriptors are left that the daemon keeps
    KVQ__HTTP_IDLE_SECONDS = 10,  // in which a connection moves a byte, and sends a whole request
    KVQ__HTTP_MEMORY = 32 << 10,  // of a connection: headers, and buffers of what is sent
    KVQ__HTTP_PATIENCE_MS = 5000, // until a request that the poller does not answer is refused
    KVQ__HTTP_TOKEN_BYTES = 32,   // random ones; in hexadecimal digits in the file
    KVQ__HTTP_NAMESPACES = 64,    // asked for in one visit of the poller
};

struct kvq__http_ask;

// Who is at the other end of a connection.
struct kvq__http_guest {
    LIST_ENTRY(kvq__http_guest) link;
    int fd;
    bool local;  // by the Unix socket: the kernel says who; else only a token does
    bool asking; // a request is there as a whole, and its answer not at the other end
    bool ending; // the connection was shut, which libmicrohttpd has yet to see
    // Since when it has been `asking`, or not: when it came, a request was whole, an answer sent.
    uint64_t since_ns;
    struct kvq__peer peer;
};
LIST_HEAD(kvq__http_guests, kvq__http_guest);

struct kvq__http_text {
    char *at; // NULL: no memory
    size_t n;
};

// ---- ask.c ----

enum kvq__http_topic {
    KVQ__HTTP_METRICS,
    KVQ__HTTP_OPEN_METRICS,
    KVQ__HTTP_HEALTH,
    KVQ__HTTP_READY,
    KVQ__HTTP_STATUS,
    KVQ__HTTP_SESSIONS,
    KVQ__HTTP_CLIENTS,
    KVQ__HTTP_PREFIXES,
    KVQ__HTTP_QUOTAS,
};

// A question to the core. It is made and answered on the loop's thread.
struct kvq__http_ask {
    struct kvq__mail mail;
    TAILQ_ENTRY(kvq__http_ask) link; // of those that wait for the poller
    struct kvq__http *http;
    enum kvq__http_topic topic;
    struct kvq__peer peer;
    uint64_t asked_ns;
    bool at_poller, answered;
    bool late;                         // the poller took too long, and the connection was told so
    struct MHD_Connection *connection; // suspended until the answer; NULL: nobody waits any more
    int status;                        // of HTTP
    const char *type;                  // of the content
    struct kvq__http_text text;
    void *part; // what the topic gathers, page by page
};
TAILQ_HEAD(kvq__http_asks, kvq__http_ask);

struct kvq__http_asking {
    struct kvq__http_asks waiting;
    struct kvq__http_ask *current; // at the poller
    struct kvq_arena arena;        // of the reply that it fills
};

// Queues it; kvq__http_answered follows, maybe after KVQ__HTTP_PATIENCE_MS. 0 or KVQ_E_NO_MEMORY.
int kvq__http_ask(struct kvq__http *http, struct kvq__http_ask *ask);
// The connection has gone or was answered otherwise: frees the question, once the poller is done.
void kvq__http_ask_leave(struct kvq__http_ask *ask);
// Has those answered that have waited too long (`late`).
void kvq__http_ask_tick(struct kvq__http *http);

// ---- guests.c ----

// Whether there is room for one more. Nobody is known who comes by the loopback address, so nobody
// there has a share: when all places are taken, the guest goes who has been without a whole request
// for longest, or else who has been taking an answer for longer than KVQ__HTTP_IDLE_SECONDS. 0, or
// KVQ_E_LIMIT with a text.
int kvq__http_guest_check(struct kvq__http_guests *guests, const struct kvq__http_guest *guest,
                          enum kvq__role role, uint64_t now_ns, char *text);
// Ends those who do not send a whole request in KVQ__HTTP_IDLE_SECONDS, however they drip it.
void kvq__http_guests_tick(struct kvq__http_guests *guests, uint64_t now_ns);
// Forgets and frees the guest, if it is still there.
void kvq__http_guest_leave(struct kvq__http_guests *guests, const struct kvq__http_guest *guest);

// ---- metrics.c ----

// Where requests come from: an engine's rings and its socket, kvqctl's socket.
enum { KVQ__HTTP_RING, KVQ__HTTP_ATTACH, KVQ__HTTP_CONTROL, KVQ__HTTP_DOORS };

// All that metrics are made of, as the poller and the store jobs have it at one moment.
struct kvq__snapshot {
    struct kvq__status status;
    struct kvq__counts counts;
    struct kvq__latencies latencies;
    struct kvq__refused refused[KVQ__HTTP_DOORS];
    const struct kvq__store_times *store_times;
    const struct kvq__storage_state *storage;
    struct kvq__pack_error pack_errors[KVQ_MAX_PACK_ERRORS];
    uint32_t n_pack_errors;
    struct kvq__place_info places[KVQ_MAX_GPUS];
    uint32_t n_places;
    struct kvq__namespace_info *namespaces;
    struct kvq__prefix_info *prefixes;
    uint32_t n_namespaces, room_namespaces, n_prefixes, room_prefixes;
    const struct kvq__identity *identity;
    uint64_t uptime_ns;
    bool has_remote; // the configuration has a remote store
};
// What jobs of the store are called in metrics and on the page.
extern const char *const kvq__http_tasks[KVQ__TIMES];
// Writes them; `open`: as OpenMetrics 1.0, else as Prometheus' text format 0.0.4.
void kvq__metrics_write(FILE *out, const struct kvq__snapshot *snapshot, bool open);

// ---- events.c ----

// {"last": N, "events": [..]} of those with a number above `after`, or, if no event has that
// number, of all that are kept: it was another daemon's. Nothing: there is no memory.
struct kvq__history;
struct kvq__http_text kvq__http_events_since(const struct kvq__history *history, uint64_t after);

// ---- storage.c ----

// How the store and the remote store are, in figures, as JSON. Nothing: there is no memory.
struct kvq__http_text kvq__http_storage(const struct kvq__server *server);

// ---- http.c ----

struct kvq__http {
    struct kvq__server *server;
    struct MHD_Daemon *daemon;
    uv_poll_t poll;
    uv_timer_t timer, tick;
    struct kvq__door local;
    struct kvq__door loopback;
    struct kvq__http_guests guests;
    struct kvq__http_asking asking;
    char token[2 * KVQ__HTTP_TOKEN_BYTES + 1];
    struct kvq_log_budget log_budget;
    bool open;
};

// Loop's thread: the question is answered; its connection goes on.
void kvq__http_answered(struct kvq__http_ask *ask);

#endif
