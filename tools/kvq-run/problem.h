// SPDX-License-Identifier: Apache-2.0
//
// How functions of kvq-run fail: they return -1 and leave one sentence for people.
#ifndef KVQ_RUN_PROBLEM_H
#define KVQ_RUN_PROBLEM_H

enum { RUN_OK = 0, RUN_FAILED = 1, RUN_USAGE = 2, RUN_NO_DAEMON = 3 }; // exit codes

struct problem {
    char text[640];
    int exit_code; // 0 until something failed
};

// Writes the sentence and returns -1. The first problem stands; later ones are consequences.
int problem_set(struct problem *p, int exit_code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
