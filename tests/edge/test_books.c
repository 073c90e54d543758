// SPDX-License-Identifier: Apache-2.0
//
// The daemon's codebooks: who holds them, which one makes room for another, several threads at
// once, and that nobody waits while a file is read.
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "daemon/runtime/server.h"
#include "daemon/store/codebooks.h"
#include "proto/limits.h"
#include "proto/status.h"
#include "storage/codebook.h"
#include "tests/edge/attach_kit.h"
#include "tests/kits/unit.h"

enum { FILES = KVQ_MAX_CODEBOOKS + 3, POOL = 4 };

static char folder[] = "/tmp/kvq-books-XXXXXX";
static char text[KVQ_TEXT_BYTES];
static struct kvq_format format;
static const struct kvq_shape shape = {1, 1, 64, 64, .dtype = KVQ_F16, .scale = 0.125f};
static struct kvq__codebooks *books;

static const char *path_of(int number)
{
    static char path[96];
    snprintf(path, sizeof path, "%s/b%d.kvqbook", folder, number);
    return path;
}

// Its first centroid tells the number.
static void write_book(int number)
{
    const struct kvq_codebook_row row = {1, 64};
    const struct kvq_codebook_plan plan = {&format, &row, 1, 0, "tiny"};
    struct kvq_codebook *book;
    struct kvq_codebook_tables t;
    assert_int_equal(kvq_codebook_new(&plan, &book, text, sizeof text), 0);
    kvq_codebook_tables(book, 0, &t);
    t.k[0] = (float)number;
    assert_int_equal(kvq_codebook_save(book, path_of(number), "", text, sizeof text), 0);
    kvq_codebook_close(&book);
}

static void load(int number, struct kvq__book_holds *holds)
{
    char name[16];
    snprintf(name, sizeof name, "b%d", number);
    kvq__codebooks_load(books, name, holds);
}

// As the core does: what was loaded.
static int get_loaded(int number, void **hold)
{
    struct kvq_book book;
    char name[16];
    *hold = NULL;
    snprintf(name, sizeof name, "b%d", number);
    int rc = kvq__codebooks_get(books, name, 0, &format, &shape, &book, hold, text);
    if (rc == 0)
        assert_true(book.k[0] == (float)number);
    return rc;
}

// As an open of a session does.
static int get(int number, void **hold)
{
    struct kvq__book_holds holds = {0};
    load(number, &holds);
    int rc = get_loaded(number, hold);
    kvq__codebooks_let_go(&holds);
    return rc;
}

// ---- Holding and making room ----

static int open_books(void **state)
{
    books = kvq__codebooks_new(folder);
    return books ? 0 : -1;
}

static int close_books(void **state)
{
    kvq__codebooks_free(&books);
    return 0;
}

TEST_BETWEEN(test_room, open_books, close_books)
{
    void *hold[KVQ_MAX_CODEBOOKS], *one;
    for (int i = 0; i < KVQ_MAX_CODEBOOKS; i++)
        assert_int_equal(get(i, &hold[i]), 0);
    assert_int_equal(get(KVQ_MAX_CODEBOOKS, &one), KVQ_E_LIMIT);
    assert_says(text, "codebook b64: sessions use 64 others, and a daemon holds 64; "
                      "drop sessions");
    assert_int_equal(get(5, &one), 0); // those that are there are still served
    assert_ptr_equal(one, hold[5]);
    kvq__codebooks_release(books, one);
    assert_int_equal(get(KVQ_MAX_CODEBOOKS, &one), KVQ_E_LIMIT); // 5 is held once more
    kvq__codebooks_release(books, hold[5]);
    kvq__codebooks_release(books, hold[7]);
    assert_int_equal(get(7, &hold[7]), 0); // used later than 5
    kvq__codebooks_release(books, hold[7]);
    unlink(path_of(7)); // if it were read again, it would fail
    unlink(path_of(5));
    assert_int_equal(get(KVQ_MAX_CODEBOOKS, &hold[5]), 0); // in the place of 5
    assert_int_equal(get(7, &hold[7]), 0);
    assert_int_equal(get(5, &one), KVQ_E_LIMIT);
    kvq__codebooks_share(books, hold[7]);
    kvq__codebooks_release(books, hold[7]);
    assert_int_equal(get(5, &one), KVQ_E_LIMIT); // the other share
    kvq__codebooks_release(books, hold[7]);
    assert_int_equal(get(5, &one), KVQ_E_SYSTEM); // there is room, but no file
    write_book(5);
    assert_int_equal(get(5, &hold[7]), 0);
    write_book(7);
    for (int i = 0; i < KVQ_MAX_CODEBOOKS; i++)
        kvq__codebooks_release(books, hold[i]);
}

// What a load could not read is told to those who wanted it, however many there are; then the file
// is looked at again.
TEST_BETWEEN(test_failures, open_books, close_books)
{
    enum { MISSING = 40 };
    struct kvq__book_holds holds = {0}, others = {0};
    void *hold;
    for (int i = 0; i < MISSING; i++)
        unlink(path_of(i));
    for (int i = 0; i < MISSING; i++) {
        load(i, &holds);
        load(i, &holds); // each once
    }
    assert_int_equal(holds.n, MISSING);
    for (int i = 0; i < MISSING; i++)
        write_book(i);
    for (int i = 0; i < 2 * MISSING; i++) {
        assert_int_equal(get_loaded(i % MISSING, &hold), KVQ_E_SYSTEM);
        assert_says(text, path_of(i % MISSING));
    }
    load(1, &others); // by now it is there, for whoever asks
    assert_int_equal(get_loaded(1, &hold), 0);
    kvq__codebooks_release(books, hold);
    kvq__codebooks_let_go(&holds);
    for (int i = 0; i < MISSING; i++) {
        assert_int_equal(get_loaded(i, &hold), i == 1 ? 0 : KVQ_E_LIMIT); // nobody has loaded it
        if (hold)
            kvq__codebooks_release(books, hold);
        assert_int_equal(get(i, &hold), 0);
        kvq__codebooks_release(books, hold);
    }
    kvq__codebooks_let_go(&others);
    kvq__codebooks_load(books, "../b1", &others);
    assert_int_equal(others.n, 0);
    unlink(path_of(1)); // what was loaded needs no file
    assert_int_equal(get(1, &hold), 0);
    kvq__codebooks_release(books, hold);
    write_book(1);
}

// What an open has loaded stays for it, though nothing uses it yet, and others come and go.
TEST_BETWEEN(test_loads_stay, open_books, close_books)
{
    struct kvq__book_holds holds = {0};
    void *hold;
    load(0, &holds);
    for (int i = 1; i < FILES; i++) {
        assert_int_equal(get(i, &hold), 0);
        kvq__codebooks_release(books, hold);
    }
    unlink(path_of(0));
    assert_int_equal(get_loaded(0, &hold), 0);
    kvq__codebooks_release(books, hold);
    for (int i = 1; i < FILES; i++)
        load(i, &holds);
    assert_int_equal(holds.n, KVQ_MAX_CODEBOOKS);
    assert_int_equal(get_loaded(FILES - 1, &hold), KVQ_E_LIMIT);
    assert_says(text, "was not read");
    kvq__codebooks_let_go(&holds);
    assert_int_equal(holds.n, 0);
    write_book(0);
}

static void *hammer(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    const struct kvq_shape s = shape;
    for (int i = 0; i < 300; i++) {
        struct kvq_book book;
        char name[16], why[KVQ_TEXT_BYTES];
        void *hold;
        int number = rand_r(&seed) % FILES;
        snprintf(name, sizeof name, "b%d", number);
        struct kvq__book_holds holds = {0};
        kvq__codebooks_load(books, name, &holds);
        int rc = kvq__codebooks_get(books, name, 0, &format, &s, &book, &hold, why);
        kvq__codebooks_let_go(&holds);
        if (rc != 0 || book.k[0] != (float)number)
            return "failed";
        if (rand_r(&seed) % 2) {
            kvq__codebooks_share(books, hold);
            kvq__codebooks_release(books, hold);
        }
        if (book.k[0] != (float)number)
            return "gone too early";
        kvq__codebooks_release(books, hold);
    }
    return NULL;
}

TEST_BETWEEN(test_threads, open_books, close_books)
{
    pthread_t thread[4];
    void *failed;
    for (uintptr_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, hammer, (void *)(i + 1)), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(thread[i], &failed), 0);
        if (failed)
            fail_msg("%s", (const char *)failed);
    }
}

// ---- In the daemon ----

static sem_t held, let_go;

static void hold_thread(uv_work_t *work)
{
    sem_post(&held);
    sem_wait(&let_go);
}

static void held_no_more(uv_work_t *work, int status)
{
}

static bool has_answer(const struct peer *p)
{
    struct pollfd look = {.fd = p->fd, .events = POLLIN};
    return poll(&look, 1, 0) == 1;
}

// While all threads that read files are taken, only who asks for a codebook waits.
COUNTED_TEST(test_nobody_waits)
{
    uv_loop_t loop;
    uv_work_t work[POOL];
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(uv_loop_init(&loop), 0);
    sem_init(&held, 0, 0);
    sem_init(&let_go, 0, 0);
    for (int i = 0; i < POOL; i++)
        assert_int_equal(uv_queue_work(&loop, &work[i], hold_thread, held_no_more), 0);
    for (int i = 0; i < POOL; i++)
        sem_wait(&held);
    peer_send_open(p, "", "vecinfer-1@b3");
    assert_int_equal(peer_open_session(other, ""), 0); // behind it, through loop and poller
    assert_int_equal(peer_open_session(other, ""), 0);
    assert_false(has_answer(p));
    for (int i = 0; i < POOL; i++)
        sem_post(&let_go);
    assert_int_equal(peer_answer(p), 0);
    assert_string_equal(p->reply->session->format, "vecinfer-1@b3");
    peer_send_open(p, "", "vecinfer-1@none");
    assert_int_equal(peer_answer(p), KVQ_E_SYSTEM);
    assert_says(p->reply->text, "none.kvqbook");
    peer_send_open(p, "", "oscar2@none");
    assert_int_equal(peer_answer(p), KVQ_E_FORMAT);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

// A client that dies while its codebook is being read takes nothing with it.
COUNTED_TEST(test_death_while_reading)
{
    for (int i = 0; i < 20; i++) {
        struct peer *p = peer_attached();
        char name[32];
        snprintf(name, sizeof name, "vecinfer-1@b%d", i);
        peer_send_open(p, "", name);
        peer_free(p);
    }
}

// Asks for layers of so many codebooks, b0 and those that follow.
static int open_many(struct peer *p, uint32_t n)
{
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__Layer rows[FILES], *row[FILES];
    char names[FILES][32];
    for (uint32_t i = 0; i < n; i++) {
        kvq__layer__init(&rows[i]);
        rows[i].q_heads = rows[i].kv_heads = 1;
        rows[i].k_dim = rows[i].v_dim = 64;
        snprintf(names[i], sizeof names[i], "vecinfer-1@b%u", i);
        rows[i].format = names[i];
        row[i] = &rows[i];
    }
    open.format = (char *)(uintptr_t) "f16";
    open.dtype = 1;
    open.layers = row;
    open.n_layers = n;
    return peer_ask(p, &REQUEST(OPEN_SESSION, open_session, &open), NULL, 0);
}

// The poller reads no file: an open that names more codebooks than there may be is refused before
// any is read, and others are served. The books have one layer each, so only the first fits.
COUNTED_TEST(test_too_many)
{
    struct peer *p = peer_attached();
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_many(p, KVQ_MAX_CODEBOOKS + 1), KVQ_E_LIMIT);
        assert_says(p->reply->text, "layer 0: codebook b0 was not read");
        assert_says(p->reply->text, "names more than 64");
    }
    assert_int_equal(open_many(p, KVQ_MAX_CODEBOOKS), KVQ_E_FORMAT);
    assert_says(p->reply->text, "layer 1");
    assert_int_equal(open_many(p, 1), 0);
    peer_send_open(p, "", "vecinfer-1@b66"); // none of the 64 is held any more
    assert_int_equal(peer_answer(p), 0);
}

// ---- The folder ----

static int set_up(void **state)
{
    setenv("UV_THREADPOOL_SIZE", "4", 1);
    if (!mkdtemp(folder) || kvq_format_parse("vecinfer-1", &format, text, sizeof text))
        return -1;
    for (int i = 0; i < FILES; i++)
        write_book(i);
    attach_codebooks(folder);
    return 0;
}

static int tear_down(void **state)
{
    for (int i = 0; i < FILES; i++)
        unlink(path_of(i));
    return rmdir(folder);
}

int main(void)
{
    return run_all(set_up, tear_down);
}
