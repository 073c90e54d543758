// SPDX-License-Identifier: Apache-2.0
//
// See fiber.h.
#include "daemon/runtime/fiber.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/status.h"

#ifdef KVQ_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef KVQ_TSAN
#include <sanitizer/tsan_interface.h>
#endif

// A stack, or the thread's own, which `own` stands for.
struct kvq__fiber_stack {
    struct kvq__fiber_stack *next; // of those kept
    ucontext_t context;            // where its fiber goes on
    const void *bottom;            // its lowest byte
    size_t bytes;
    void *mapping;     // with the page below it
    void *asan, *tsan; // what sanitizers keep for it
};

// ---- Switching ----

// Not a call to ThreadSanitizer either: it would end on another fiber than it began on.
#define ALWAYS_INLINE static inline __attribute__((always_inline))

// What comes before leaving `from` for `to`; `last`: nobody comes back to `from`.
ALWAYS_INLINE void tell_leaving(struct kvq__fiber_stack *from, struct kvq__fiber_stack *to,
                                bool last)
{
    (void)from;
    (void)to;
    (void)last;
#ifdef KVQ_ASAN
    __sanitizer_start_switch_fiber(last ? NULL : &from->asan, to->bottom, to->bytes);
#endif
#ifdef KVQ_TSAN
    __tsan_switch_to_fiber(to->tsan, 0);
#endif
}

// What comes first once `to` runs. The thread's own stack is learned of here.
ALWAYS_INLINE void tell_arrived(struct kvq__fiber_stack *to, struct kvq__fiber_stack *from)
{
    (void)to;
    (void)from;
#ifdef KVQ_ASAN
    __sanitizer_finish_switch_fiber(to->asan, &from->bottom, &from->bytes);
#endif
}

// On the fiber's stack.
static void fiber_main(unsigned high, unsigned low)
{
    struct kvq__fibers *fibers = (struct kvq__fibers *)((uintptr_t)high << 32 | (uintptr_t)low);
    struct kvq__fiber *f = fibers->now;
    f->stack->asan = NULL; // it was never left
    tell_arrived(f->stack, fibers->own);
    f->run(f->context);
    assert(fibers->now == f && f->state == KVQ__FIBER_RUNNING);
    f->state = KVQ__FIBER_NONE;
    tell_leaving(f->stack, fibers->own, true);
    setcontext(&fibers->thread);
    abort(); // setcontext returns for a context that is none
}

static void prepare_stack(struct kvq__fibers *fibers, struct kvq__fiber_stack *s)
{
    uintptr_t at = (uintptr_t)fibers;
    getcontext(&s->context);
    s->context.uc_stack.ss_sp = (char *)s->mapping + (size_t)sysconf(_SC_PAGESIZE);
    s->context.uc_stack.ss_size = KVQ__FIBER_STACK;
    s->context.uc_link = NULL;
    s->bottom = s->context.uc_stack.ss_sp;
    s->bytes = KVQ__FIBER_STACK;
#ifdef KVQ_TSAN
    s->tsan = __tsan_create_fiber(0);
#endif
    makecontext(&s->context, (void (*)(void))fiber_main, 2, (unsigned)(at >> 32), (unsigned)at);
}

static void give_stack(struct kvq__fibers *fibers, struct kvq__fiber *f);

// The thread goes to the fiber's stack, and is back when the fiber waits or has ended.
static void resume(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    assert(!fibers->now && (f->state == KVQ__FIBER_WAITING || f->state == KVQ__FIBER_MADE));
    fibers->now = f;
    f->state = KVQ__FIBER_RUNNING;
    struct kvq__fiber_stack *stack = f->stack;
#ifdef KVQ_TSAN
    fibers->own->tsan = __tsan_get_current_fiber();
#endif
    tell_leaving(fibers->own, stack, false);
    swapcontext(&fibers->thread, &stack->context);
    tell_arrived(fibers->own, stack);
    fibers->now = NULL;
    if (f->state == KVQ__FIBER_NONE) {
#ifdef KVQ_TSAN
        __tsan_destroy_fiber(stack->tsan);
#endif
        give_stack(fibers, f);
        f->ended(f->context); // which may free the fiber
    }
}

// Goes on with all that were woken, and with those that these wake.
static void resume_woken(struct kvq__fibers *fibers)
{
    struct kvq__fiber *f;
    if (fibers->going) // further up on this thread
        return;
    fibers->going = true;
    while ((f = TAILQ_FIRST(&fibers->woken))) {
        TAILQ_REMOVE(&fibers->woken, f, link);
        f->woken = false;
        resume(fibers, f);
    }
    fibers->going = false;
}

static void put_behind(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    assert(!f->woken);
    f->woken = true;
    TAILQ_INSERT_TAIL(&fibers->woken, f, link);
    resume_woken(fibers);
}

void kvq__fiber_wait(struct kvq__fibers *fibers)
{
    struct kvq__fiber *f = fibers->now;
    struct kvq__fiber_stack *stack = f->stack;
    assert(f->state == KVQ__FIBER_RUNNING);
    f->state = KVQ__FIBER_WAITING;
    tell_leaving(stack, fibers->own, false);
    swapcontext(&stack->context, &fibers->thread);
    tell_arrived(stack, fibers->own);
}

void kvq__fiber_wake(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    assert(f->state == KVQ__FIBER_WAITING);
    put_behind(fibers, f);
}

void kvq__fiber_run(struct kvq__fibers *fibers, struct kvq__fiber *f, void (*run)(void *context),
                    void (*ended)(void *context), void *context)
{
    assert(f->state == KVQ__FIBER_MADE && run && ended);
    f->run = run;
    f->ended = ended;
    f->context = context;
    prepare_stack(fibers, f->stack);
    put_behind(fibers, f);
}

// ---- Stacks ----

static void free_stack(struct kvq__fiber_stack *s)
{
    if (!s)
        return;
    if (s->mapping)
        munmap(s->mapping, KVQ__FIBER_STACK + (size_t)sysconf(_SC_PAGESIZE));
    free(s);
}

// NULL: no memory.
static struct kvq__fiber_stack *new_stack(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct kvq__fiber_stack *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    void *at = mmap(NULL, KVQ__FIBER_STACK + page, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED)
        s->mapping = at;
    if (!s->mapping || mprotect(s->mapping, page, PROT_NONE) < 0) {
        free_stack(s);
        return NULL;
    }
    return s;
}

int kvq__fiber_make(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    assert(f->state == KVQ__FIBER_NONE && !f->woken);
    pthread_mutex_lock(&fibers->lock);
    f->stack = fibers->kept;
    if (f->stack) {
        fibers->kept = f->stack->next;
        fibers->n_kept--;
    }
    pthread_mutex_unlock(&fibers->lock);
    bool fresh = !f->stack;
    if (fresh && !(f->stack = new_stack()))
        return KVQ_E_NO_MEMORY;
    pthread_mutex_lock(&fibers->lock);
    fibers->n_stacks += fresh;
    pthread_mutex_unlock(&fibers->lock);
    f->state = KVQ__FIBER_MADE;
    return 0;
}

// Keeps some for later; any thread.
static void give_stack(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    struct kvq__fiber_stack *s = f->stack;
    f->stack = NULL;
    pthread_mutex_lock(&fibers->lock);
    bool keeps = fibers->n_kept < KVQ__FIBER_STACKS_KEPT;
    if (keeps) {
        s->next = fibers->kept;
        fibers->kept = s;
        fibers->n_kept++;
    } else {
        fibers->n_stacks--;
    }
    pthread_mutex_unlock(&fibers->lock);
    if (!keeps)
        free_stack(s);
}

void kvq__fiber_unmake(struct kvq__fibers *fibers, struct kvq__fiber *f)
{
    if (f->state == KVQ__FIBER_NONE)
        return;
    assert(f->state == KVQ__FIBER_MADE && !f->woken);
    f->state = KVQ__FIBER_NONE;
    give_stack(fibers, f);
}

// ---- Opening and closing ----

int kvq__fibers_open(struct kvq__fibers *fibers)
{
    *fibers = (struct kvq__fibers){.own = calloc(1, sizeof *fibers->own)};
    if (!fibers->own)
        return KVQ_E_NO_MEMORY;
    TAILQ_INIT(&fibers->woken);
    pthread_mutex_init(&fibers->lock, NULL);
    return 0;
}

void kvq__fibers_close(struct kvq__fibers *fibers)
{
    struct kvq__fiber_stack *s;
    if (!fibers->own) // it was never opened
        return;
    assert(!fibers->now && TAILQ_EMPTY(&fibers->woken) && fibers->n_stacks == fibers->n_kept);
    while ((s = fibers->kept)) {
        fibers->kept = s->next;
        free_stack(s);
    }
    free(fibers->own);
    pthread_mutex_destroy(&fibers->lock);
    *fibers = (struct kvq__fibers){0};
}
