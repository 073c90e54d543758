// SPDX-License-Identifier: Apache-2.0
//
// Moves of sessions between places: from the host's memory to a GPU's, back, and from one GPU to
// another, while clients have them open.
//
// A move waits until its sessions are in no step and no request uses them; from then on requests
// wait for the move. It takes a block on the other place for each block of the sessions, copies the
// bytes as they are, and exchanges all blocks at once. Then it gives the old blocks back. If
// anything fails before the exchange, the new blocks are given back instead and nothing has
// changed.
//
// Bytes travel through pieces of pinned memory, on a stream of the mover's own on each GPU, which
// the poller looks at between two looks at the rings: no client's work stream waits for it, and the
// poller never does. All of it happens in kvq__moves_poll, a little at a time.
//
// While both copies are there, a limit that counts both (from one GPU to another) counts one: the
// old block of each pair is exempt (struct kvq__block), unless a fork shares and so keeps it.
// Between the host and a GPU each block counts where it is, and the move is held to the limit of
// the new place.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_MOVE_H
#define KVQ_DAEMON_CORE_RESIDENCY_MOVE_H

#include "daemon/core/residency/advance.h"
#include "daemon/core/residency/ticket.h"

// One session's part of a move. Its references are numbered: for each layer with pages of its own,
// a raw and a packed block of each page, then the extras.
struct kvq__moved {
    struct kvq__session *session; // NULL once the session is moved, or will not be
    uint32_t n_owned, n_pages;
    uint32_t *owned;            // numbers of the layers with pages of their own
    uint32_t n_sheets, room;    // room: sheets that `sheets` has room for
    struct kvq__sheet **sheets; // on the other place: the new ones, then the old ones
    struct kvq__ref *extras;    // for each layer
    struct kvq_book *books;     // for each layer, on the other GPU
    struct kvq__gpu_counts *counts;
    uint32_t n_layers;
};

struct kvq__move {
    struct kvq__ticket ticket; // first: freed with it
    struct kvq__pool *to;
    bool demotes;
    uint64_t wait_ns;  // how long the move waits for steps and requests
    uint64_t deadline; // the end of that wait
    bool held_up;      // another move copies meanwhile
    uint64_t left;     // of wait_ns when the move was held up
    uint32_t n, room;  // n: sessions; room: memory for so many
    struct kvq__moved *moved;
    uint32_t at; // session and reference that come next
    uint64_t ref;
    size_t offset; // of the next bytes to copy, in the block
    struct kvq__flight flight;
    uint64_t reserved_bytes;
};

// The first ticket's move behind this one's (NULL: of all); NULL = there is none.
struct kvq__move *kvq__move_after(const struct kvq__core *core, const struct kvq__move *move);

// The number of references; 0 until all memory for the part was had.
static inline uint64_t kvq__moved_refs(const struct kvq__moved *m)
{
    bool whole = m->owned && m->extras && m->books && m->n_sheets * KVQ__SHEET_PAGES >= m->n_pages;
    return whole ? (uint64_t)m->n_owned * (2 * (uint64_t)m->n_pages + 1) : 0;
}
// The move's reference, and the session's in its place; and the bytes of such a block.
struct kvq__ref *kvq__moved_there(const struct kvq__moved *m, uint64_t ref);
struct kvq__ref *kvq__moved_here(const struct kvq__moved *m, uint64_t ref);
uint64_t kvq__moved_bytes(const struct kvq__moved *m, uint64_t ref);

// Whether other sessions have the sheet, one of these, that holds the reference.
bool kvq__moved_is_shared(const struct kvq__moved *m, struct kvq__sheet *const *sheets,
                          uint64_t ref);

// ---- Room at the other place (move_room.c) ----

uint64_t kvq__move_need(const struct kvq__move *move); // bytes
// Whether the move could ever fit: 0, or a code with a text.
int kvq__move_check_room(const struct kvq__move *move, char *text);
// Goes to the next reference of the move, if need be; false behind the last one.
bool kvq__move_next(struct kvq__move *move);
// Takes some of the move's blocks: enum kvq__advance, or a code, which has been told, with
// move->ticket.text.
int kvq__move_reserve(struct kvq__move *move);

// ---- For the rest of the core (move.c) ----

// Whether the session can be moved there at all: 0, or KVQ_E_BUSY or KVQ_E_SHAPE with a text.
int kvq__session_movable(const struct kvq__session *session, const struct kvq__pool *to,
                         char *text);
// Begins to move the session, or all its shards.
int kvq__move_start(struct kvq__session *session, const struct kvq__move_spec *spec,
                    struct kvq__move_info *info, char *text);
// The session is about to end: its move ends.
void kvq__move_lost(struct kvq__session *session);
// Whether requests on the session are to wait for its move.
bool kvq__move_asks(const struct kvq__session *session);
// The place that the session is being moved to; NULL = none.
struct kvq__pool *kvq__move_place(const struct kvq__session *session);
// Takes moves further; true if there was something to do.
bool kvq__moves_poll(struct kvq__core *core);
void kvq__moves_close(struct kvq__core *core);

// ---- Copying (move_copy.c) ----

// Makes what copies, at the first move, for all moves. 0, KVQ_E_NO_MEMORY, KVQ_E_SYSTEM.
int kvq__mover_open(struct kvq__core *core);
void kvq__mover_close(struct kvq__core *core); // nothing is under way
// Takes the move's copies further. *any if there was something to do. KVQ__COMPLETE when all is
// copied, else KVQ__MORE or KVQ_E_SYSTEM.
int kvq__mover_copy(struct kvq__move *move, bool *any);
// Whether no copy is under way any more, for a move that has failed.
bool kvq__mover_drained(struct kvq__core *core);
// Waits for copies under way; when the core closes.
void kvq__mover_sync(struct kvq__core *core);

#endif
