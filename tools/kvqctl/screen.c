// SPDX-License-Identifier: Apache-2.0
// The terminal side of kvqctl top: ANSI sequences that every terminal has.
#include "tools/kvqctl/screen.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "tools/kvqctl/table.h"

#define ENTER "\033[?1049h\033[?25l" // the other screen, without a cursor
#define LEAVE "\033[?25h\033[?1049l"

int64_t kvq__screen_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void measure(struct kvq__screen *s)
{
    struct winsize size = {0};
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
    s->rows = known && size.ws_row ? size.ws_row : 24;
    s->columns = known && size.ws_col ? size.ws_col : 80;
}

int kvq__screen_open(struct kvq__screen *s)
{
    sigset_t set;
    *s = (struct kvq__screen){0};
    sigemptyset(&set);
    sigaddset(&set, SIGWINCH);
    sigaddset(&set, SIGTSTP); // nobody would give the terminal back
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0)
        return -errno;
    s->change_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->change_fd < 0)
        return -errno;
    s->keys = tcgetattr(STDIN_FILENO, &s->before) == 0;
    if (s->keys) {
        struct termios raw = s->before;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        raw.c_cc[VMIN] = 0;
        raw.c_cc[VTIME] = 0;
        raw.c_cc[VSUSP] = raw.c_cc[VQUIT] = _POSIX_VDISABLE; // they would leave the screen as it is
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    measure(s);
    fputs(ENTER, stdout);
    fflush(stdout);
    return 0;
}

void kvq__screen_close(struct kvq__screen *s)
{
    fputs(LEAVE, stdout);
    fflush(stdout);
    if (s->keys)
        tcsetattr(STDIN_FILENO, TCSANOW, &s->before);
    close(s->change_fd);
}

// ---- Keys ----

static const struct key {
    const char *bytes;
    enum kvq__screen_news news;
} keys[] = {
    {"\033[A", KVQ__SCREEN_UP},       {"\033OA", KVQ__SCREEN_UP},
    {"\033[B", KVQ__SCREEN_DOWN},     {"\033OB", KVQ__SCREEN_DOWN},
    {"\033[5~", KVQ__SCREEN_PAGE_UP}, {"\033[6~", KVQ__SCREEN_PAGE_DOWN},
    {"\033[H", KVQ__SCREEN_HOME},     {"\033[1~", KVQ__SCREEN_HOME},
    {"\033OH", KVQ__SCREEN_HOME},     {"\033[F", KVQ__SCREEN_END},
    {"\033[4~", KVQ__SCREEN_END},     {"\033OF", KVQ__SCREEN_END},
};

static void forget(struct kvq__screen *s, size_t n)
{
    s->n_typed -= n;
    memmove(s->typed, s->typed + n, s->n_typed);
}

// The next key of what was typed. False: there is none, or not all of it.
static bool take_key(struct kvq__screen *s, enum kvq__screen_news *news, char *letter)
{
    bool begins = false; // a known key
    if (s->n_typed == 0)
        return false;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        size_t length = strlen(keys[i].bytes);
        size_t n = length < s->n_typed ? length : s->n_typed;
        if (memcmp(s->typed, keys[i].bytes, n) != 0)
            continue;
        begins = true;
        if (n == length) {
            *news = keys[i].news;
            forget(s, n);
            return true;
        }
    }
    if (begins)
        return false;
    *news = KVQ__SCREEN_LETTER;
    *letter = s->typed[0];
    forget(s, 1);
    return true;
}

enum kvq__screen_news kvq__screen_wait(struct kvq__screen *s, int stop_fd, int64_t until_ms,
                                       char *letter)
{
    enum kvq__screen_news news;
    while (!take_key(s, &news, letter)) {
        struct signalfd_siginfo signal;
        struct pollfd fds[] = {{.fd = stop_fd, .events = POLLIN},
                               {.fd = s->change_fd, .events = POLLIN},
                               {.fd = s->keys ? STDIN_FILENO : -1, .events = POLLIN}};
        int64_t left = until_ms - kvq__screen_now();
        int ready = poll(fds, 3, left > 0 ? (int)left : 0);
        if (ready < 0 && errno != EINTR)
            return KVQ__SCREEN_STOP;
        if (ready == 0)
            return KVQ__SCREEN_TIME;
        if (ready > 0 && fds[0].revents)
            return KVQ__SCREEN_STOP;
        if (ready > 0 && fds[1].revents) {
            while (read(s->change_fd, &signal, sizeof signal) > 0)
                ;
            measure(s);
            return KVQ__SCREEN_SIZE;
        }
        if (ready > 0 && fds[2].revents) {
            ssize_t n = read(STDIN_FILENO, s->typed + s->n_typed, sizeof s->typed - s->n_typed);
            if (n <= 0) // the terminal is gone
                return KVQ__SCREEN_STOP;
            s->n_typed += (size_t)n;
        }
    }
    return news;
}

// ---- Drawing ----

void kvq__screen_draw(const struct kvq__screen *s, const char *const *lines, size_t n)
{
    fputs("\033[H", stdout);
    for (size_t i = 0; i < n && i < (size_t)s->rows; i++)
        printf("%s\033[K%.*s", i ? "\n" : "", (int)kvq__ctl_fitting(lines[i], s->columns),
               lines[i]);
    fputs("\033[J", stdout);
    fflush(stdout);
}
