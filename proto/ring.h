// SPDX-License-Identifier: Apache-2.0
//
// The rings of the data plane: every atomic operation on shared memory, for both sides.
//
// A ring has one producer (struct kvq_ring_tx) and one consumer (struct kvq_ring_rx), each in one
// thread of its process. Indices are free-running slot counts. A side's own index is a private
// variable, so nothing the peer writes can move it; the shared copy is write-only. The peer's
// index is read into a private copy and must lie where honest work could have put it, else the
// call returns KVQ_E_PROTOCOL and the peer is to be cut off. Memory order:
//
//   publish   store-release of tail: the slots' bytes are written before the index shows them
//   poll      load-acquire of the peer's tail: the bytes are read after the index
//   consume   store-release of head: the bytes have been read before the slots are given back
//   room      load-acquire of the peer's head: slots are written again only after that
//   sleeping  flag = 1, full fence, poll again, sleep; awake again: flag = 0
//   waking    publish, full fence, read the peer's flag; 1: wake the peer (shm.h says by what)
//
// The two fences pair (store, fence, load on both sides): either the sleeper sees the message or
// the publisher sees the flag. Only the sleeper writes its flag: a publisher that cleared the flag
// could erase the flag of the next sleep. A client drains its waker before it polls the ring again,
// never between poll and sleep. The poller waits for edges and drains nothing.
//
// Functions are not thread-safe beyond the above; they do not allocate, lock or enter the kernel.
#ifndef KVQ_PROTO_RING_H
#define KVQ_PROTO_RING_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "proto/limits.h"
#include "proto/shm.h"
#include "proto/status.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVQ_RING_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define KVQ_RING_TSAN 1
#endif

// ---- Words of shared memory ----

#ifndef KVQ_RING_MODEL // a test puts its own five functions here and tries every interleaving

static inline uint32_t kvq_word_load(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint64_t kvq_word64_load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void kvq_word64_store_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint32_t kvq_word_load_acquire(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void kvq_word_store(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline void kvq_word_store_release(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void kvq_word_fence(void)
{
#ifdef KVQ_RING_TSAN
    // ThreadSanitizer does not model fences and refuses to compile them. No data depends on
    // this one (that is the acquire and release above), so any full barrier of the CPU will do.
    uint32_t word = 0;
    __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

#endif

// Tells the CPU that this is a spin loop.
static inline void kvq_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// ---- Producer ----

struct kvq_ring_tx {
    uint8_t *slots;
    uint32_t n_slots;            // a power of two
    uint32_t tail;               // own index
    uint32_t head;               // the peer's index as last seen and checked
    uint32_t *shared_tail;       // written here
    const uint32_t *shared_head; // written by the peer
};

// Slots that may be written now, into *room. KVQ_E_PROTOCOL: the peer's head went backwards or
// past our tail.
static inline int kvq_ring_room(struct kvq_ring_tx *tx, uint32_t *room)
{
    uint32_t head = kvq_word_load_acquire(tx->shared_head);
    if (head - tx->head > tx->tail - tx->head)
        return KVQ_E_PROTOCOL;
    tx->head = head;
    *room = tx->n_slots - (tx->tail - head);
    return KVQ_OK;
}

// Writes bytes at byte offset `at` behind tail, wrapping; the peer does not see them yet. The
// caller has asked kvq_ring_room for all the slots it touches.
static inline void kvq_ring_write(struct kvq_ring_tx *tx, size_t at, const void *from, size_t bytes)
{
    size_t size = (size_t)tx->n_slots * KVQ_SLOT_BYTES;
    size_t start = ((size_t)tx->tail * KVQ_SLOT_BYTES + at) & (size - 1);
    size_t first = bytes < size - start ? bytes : size - start;
    assert(at + bytes <= (size_t)(tx->n_slots - (tx->tail - tx->head)) * KVQ_SLOT_BYTES);
    memcpy(tx->slots + start, from, first);
    if (first < bytes)
        memcpy(tx->slots, (const uint8_t *)from + first, bytes - first);
}

// Shows `slots` written slots to the peer. Follow with kvq_ring_sleeps on the peer's flag.
static inline void kvq_ring_publish(struct kvq_ring_tx *tx, uint32_t slots)
{
    assert(slots <= tx->n_slots - (tx->tail - tx->head));
    tx->tail += slots;
    kvq_word_store_release(tx->shared_tail, tx->tail);
}

// ---- Consumer ----

struct kvq_ring_rx {
    const uint8_t *slots;
    uint32_t n_slots;            // a power of two
    uint32_t head;               // own index
    uint32_t tail;               // the peer's index as last seen and checked
    uint32_t *shared_head;       // written here
    const uint32_t *shared_tail; // written by the peer
};

// Slots that may be read now, into *ready. KVQ_E_PROTOCOL: the peer's tail went backwards or
// further ahead than the ring is long.
static inline int kvq_ring_poll(struct kvq_ring_rx *rx, uint32_t *ready)
{
    uint32_t tail = kvq_word_load_acquire(rx->shared_tail);
    if (tail - rx->head > rx->n_slots || tail - rx->head < rx->tail - rx->head)
        return KVQ_E_PROTOCOL;
    rx->tail = tail;
    *ready = tail - rx->head;
    return KVQ_OK;
}

// Copies bytes at byte offset `at` behind head into private memory, wrapping. The peer may be
// writing there at the same time: copy once, then look only at the copy. The caller has asked
// kvq_ring_poll for all the slots it touches.
static inline void kvq_ring_copy(const struct kvq_ring_rx *rx, size_t at, void *to, size_t bytes)
{
    size_t size = (size_t)rx->n_slots * KVQ_SLOT_BYTES;
    size_t start = ((size_t)rx->head * KVQ_SLOT_BYTES + at) & (size - 1);
    size_t first = bytes < size - start ? bytes : size - start;
    assert(at + bytes <= (size_t)(rx->tail - rx->head) * KVQ_SLOT_BYTES);
    memcpy(to, rx->slots + start, first);
    if (first < bytes)
        memcpy((uint8_t *)to + first, rx->slots, bytes - first);
    // Without this the compiler may read the ring a second time where the copy is used.
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// Gives `slots` read slots back to the peer.
static inline void kvq_ring_consume(struct kvq_ring_rx *rx, uint32_t slots)
{
    assert(slots <= rx->tail - rx->head);
    rx->head += slots;
    kvq_word_store_release(rx->shared_head, rx->head);
}

// ---- Sleeping and waking ----

// Sets the caller's own sleep flag. Poll every ring again after it; sleep only if all are empty.
static inline void kvq_ring_sleep_begin(uint32_t *own_flag)
{
    kvq_word_store(own_flag, 1);
    kvq_word_fence();
}

// After waking up (a client: and draining its waker), or when there was no need to sleep after all.
static inline void kvq_ring_sleep_end(uint32_t *own_flag)
{
    kvq_word_store(own_flag, 0);
}

// After publishing (one message or several): must the peer be woken?
static inline bool kvq_ring_sleeps(const uint32_t *peer_flag)
{
    kvq_word_fence();
    return kvq_word_load(peer_flag) != 0;
}

// Whether a thread of a client may spin: not while the daemon and its clients have more runnable
// threads than CPUs, where a spinning thread could take the CPU from the thread that it waits for.
static inline bool kvq_ring_may_spin(const struct kvq_daemon_page *page)
{
    uint64_t runnable =
        (uint64_t)kvq_word_load(&page->awake) + kvq_word_load(&page->runnable_clients);
    return runnable <= kvq_word_load(&page->cpus);
}

// ---- The two rings of a queue ----

#define KVQ_REQ_RING_BYTES (sizeof(struct kvq_req_page) + (size_t)KVQ_REQ_SLOTS * KVQ_SLOT_BYTES)
#define KVQ_CQ_RING_BYTES  (sizeof(struct kvq_cq_page) + (size_t)KVQ_CQ_SLOTS * KVQ_SLOT_BYTES)

// Each side starts from index 0, which fresh memory holds. Every queue has fresh rings, so the
// first poll finds a peer that starts elsewhere.

// Client: sends requests, receives completions.
static inline void kvq_ring_client_side(struct kvq_req_page *req, const struct kvq_cq_page *cq,
                                        struct kvq_ring_tx *tx, struct kvq_ring_rx *rx)
{
    *tx =
        (struct kvq_ring_tx){(uint8_t *)(req + 1), KVQ_REQ_SLOTS, 0, 0, &req->tail, &cq->req_head};
    *rx = (struct kvq_ring_rx){
        (const uint8_t *)(cq + 1), KVQ_CQ_SLOTS, 0, 0, &req->cq_head, &cq->tail};
}

// Daemon: receives requests, sends completions.
static inline void kvq_ring_daemon_side(const struct kvq_req_page *req, struct kvq_cq_page *cq,
                                        struct kvq_ring_rx *rx, struct kvq_ring_tx *tx)
{
    *rx = (struct kvq_ring_rx){
        (const uint8_t *)(req + 1), KVQ_REQ_SLOTS, 0, 0, &cq->req_head, &req->tail};
    *tx = (struct kvq_ring_tx){(uint8_t *)(cq + 1), KVQ_CQ_SLOTS, 0, 0, &cq->tail, &req->cq_head};
}

// ---- The daemon's page ----

// Only the poller's thread writes it.
static inline void kvq_ring_set_runnable(struct kvq_daemon_page *page, uint32_t clients)
{
    kvq_word_store(&page->runnable_clients, clients);
}

#endif
