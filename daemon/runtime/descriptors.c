// SPDX-License-Identifier: Apache-2.0
//
// Counting open descriptors; see descriptors.h.
#include "daemon/runtime/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

static const char own_descriptors[] = "/proc/self/fd";

uint32_t kvq__descriptors_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 0;
    return limit.rlim_cur < UINT32_MAX ? (uint32_t)limit.rlim_cur : UINT32_MAX;
}

// Before Linux 6.2 the folder's size does not tell how many are in it.
static uint32_t count_entries(void)
{
    uint32_t count = 0;
    DIR *folder = opendir(own_descriptors);
    if (!folder) // there is no descriptor left for it
        return UINT32_MAX;
    for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder))
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count - 1; // the folder's own
}

uint32_t kvq__descriptors_free(void)
{
    struct stat st;
    uint32_t limit = kvq__descriptors_limit();
    bool told = stat(own_descriptors, &st) == 0 && st.st_size > 0;
    uint64_t count = told ? (uint64_t)st.st_size : count_entries();
    return count < limit ? limit - (uint32_t)count : 0;
}

uint32_t kvq__descriptors_kept(void)
{
    uint32_t part = kvq__descriptors_limit() / 8;
    return part < KVQ__FILES_KEPT_LEAST  ? KVQ__FILES_KEPT_LEAST
           : part > KVQ__FILES_KEPT_MOST ? KVQ__FILES_KEPT_MOST
                                         : part;
}

bool kvq__share_allows(uint64_t own, uint64_t more, uint64_t used, uint64_t most)
{
    return used <= most && more <= most - used && own + more <= most - used - more;
}
