// SPDX-License-Identifier: Apache-2.0
//
// The daemon's log: one line an event in logfmt, `ts=... level=... event=... key=value ...`, to
// stderr or a file. A line is built on the stack and written with one system call, so threads
// may log at the same time and nothing is allocated. Lines longer than KVQ_LOG_LINE are cut.
#ifndef KVQ_DAEMON_LOG_LOG_H
#define KVQ_DAEMON_LOG_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// KVQ_LOG_ALWAYS is of lines alone: they are told as info, and no level of the log leaves them out.
// Who changed what is told so, for whoever may change something may change the level as well.
enum kvq_log_level { KVQ_LOG_ERROR, KVQ_LOG_WARN, KVQ_LOG_INFO, KVQ_LOG_DEBUG, KVQ_LOG_ALWAYS };

enum { KVQ_LOG_LINE = 1024 };

// Opens the log; path NULL or "": stderr. 0, or a negative KVQ_E code with text (KVQ_TEXT_BYTES).
// Call before threads start. Without it lines of level info and above go to stderr.
int kvq__log_open(const char *path, enum kvq_log_level level, char *text);
void kvq__log_close(void);

// Opens where lines are to go from some time on, as kvq__log_open does: a descriptor for
// kvq__log_use or close(), or a negative code with text. Any thread.
int kvq__log_prepare(const char *path, char *text);
// Whether that would do: 0, or a negative code with text. No file is made. Any thread.
int kvq__log_check(const char *path, char *text);
// From here on lines go there, while other threads may log; takes the descriptor. One thread at a
// time.
void kvq__log_use(int fd, enum kvq_log_level level);
// Whether lines of that level are written. Any thread.
bool kvq__log_has(enum kvq_log_level level);

// `event` is a word; `format` gives the pairs that follow it, e.g. "client=%llu uid=%u". Texts
// from outside go through kvq__log_quote first.
__attribute__((format(printf, 3, 4))) void kvq__log(enum kvq_log_level level, const char *event,
                                                    const char *format, ...);

// Budget for lines that a peer can cause at will: KVQ_LOG_BURST at once, then one a second. What
// tells of refusals, of connections that never became clients and of changes by the control socket
// has one. Events of clients and sessions have none: operators find out from them who had what, and
// each names the client. What is held back is counted and told with the next line that passes.
// Zero-initialize; one thread at a time.
enum { KVQ_LOG_BURST = 5 };
struct kvq_log_budget {
    uint64_t full_at_ns; // when the budget is whole again
    uint32_t held_back;
};
__attribute__((format(printf, 4, 5))) void kvq__log_client(struct kvq_log_budget *budget,
                                                           enum kvq_log_level level,
                                                           const char *event, const char *format,
                                                           ...);
// Whether kvq__log_client would write a line now, for callers to whom its text is work. A line that
// it would not write for want of budget is counted as held back.
bool kvq__log_allows(struct kvq_log_budget *budget, enum kvq_log_level level);

// Writes "text" in quotes, with quotes, backslashes and control characters escaped, cut to fit.
// Returns out.
const char *kvq__log_quote(char *out, size_t size, const char *text);

#endif
