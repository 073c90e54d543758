// SPDX-License-Identifier: Apache-2.0
//
// The source of the core's extents in host memory, and the huge pages of the system.
//
// Extents are memfds. The kernel puts them into huge pages by itself where
// /sys/kernel/mm/transparent_hugepage/shmem_enabled allows it. Where it does not, explicit huge
// pages are taken, if the administrator has set some aside (vm.nr_hugepages).
#ifndef KVQ_DAEMON_RUNTIME_MEMORY_H
#define KVQ_DAEMON_RUNTIME_MEMORY_H

#include "daemon/core/core.h"
#include "daemon/log/log.h"

enum { KVQ__HUGE_PAGE = 2 << 20 }; // extents are multiples of it

// The option huge_pages, in the order of its words.
enum kvq__huge_pages {
    KVQ__HUGE_AUTO,    // explicit ones where there are no transparent ones, else small pages
    KVQ__HUGE_OFF,     // never explicit ones
    KVQ__HUGE_REQUIRE, // explicit ones or none at all
};

struct kvq__memory_source {
    enum kvq__huge_pages huge;
    bool transparent; // the kernel gives shared memory huge pages by itself
    uint64_t pool_bytes;
    uint64_t set_aside; // of it: in huge pages, as many as were available at the start
    bool told;          // that there are too few huge pages
    struct kvq_log_budget log_budget;
};

// What the kernel reports; zeros if it reports nothing.
struct kvq__huge_counts {
    uint64_t total, available; // explicit pages of 2 MiB; available: neither used nor reserved
    bool transparent;
};
struct kvq__huge_counts kvq__huge_counts(void);

// For configurations that require huge pages: 0, or KVQ_E_NO_MEMORY with a text if the pool needs
// more than are available.
int kvq__memory_check(const struct kvq__memory_source *source,
                      const struct kvq__huge_counts *counts, char *text);

// How many bytes of the pool come out of pages that were set aside.
uint64_t kvq__memory_set_aside(const struct kvq__memory_source *source,
                               const struct kvq__huge_counts *counts);

// The source stays where it is as long as the core lives; only the poller's thread uses it.
struct kvq__memory_ops kvq__memory_ops(struct kvq__memory_source *source);

#endif
