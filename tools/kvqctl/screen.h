// SPDX-License-Identifier: Apache-2.0
//
// A terminal's other screen, and the keys pressed there. Whoever opens it closes it, also when a
// signal ends the program: its terminal is then as it was before.
#ifndef KVQ_TOOLS_KVQCTL_SCREEN_H
#define KVQ_TOOLS_KVQCTL_SCREEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <termios.h>

struct kvq__screen {
    struct termios before;
    bool keys;     // standard input is a terminal, too
    int change_fd; // readable once the terminal has another size
    int rows, columns;
    char typed[16]; // of a key that has not come as a whole
    size_t n_typed;
};

enum kvq__screen_news {
    KVQ__SCREEN_TIME, // nothing has happened until then
    KVQ__SCREEN_STOP, // stop_fd is readable
    KVQ__SCREEN_SIZE,
    KVQ__SCREEN_UP,
    KVQ__SCREEN_DOWN,
    KVQ__SCREEN_PAGE_UP,
    KVQ__SCREEN_PAGE_DOWN,
    KVQ__SCREEN_HOME,
    KVQ__SCREEN_END,
    KVQ__SCREEN_LETTER, // the screen's `letter`
};

// 0 or a negative errno. Blocks SIGWINCH, so it comes before threads are made.
int kvq__screen_open(struct kvq__screen *screen);
void kvq__screen_close(struct kvq__screen *screen);
// Waits for a key or whatever else comes first, up to a time of CLOCK_MONOTONIC in milliseconds.
enum kvq__screen_news kvq__screen_wait(struct kvq__screen *screen, int stop_fd, int64_t until_ms,
                                       char *letter);
int64_t kvq__screen_now(void);
// Shows lines of a text, each cut where the terminal ends.
void kvq__screen_draw(const struct kvq__screen *screen, const char *const *lines, size_t n);

#endif
