// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench: what the kernels and the ring cost on this machine, against its own floors.
#include <string.h>

#include "tools/kvq-bench/bench.h"
#include "tools/kvq-bench/quality.h"

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "quality") == 0)
        return quality_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "hop") == 0)
        return hop_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "storage") == 0)
        return storage_main(argc - 1, argv + 1);
    struct bench_options o;
    int status = bench_options_read(&o, argc, argv);
    if (status)
        return status > 0 ? 0 : 2;
    if (strcmp(o.command, "attend") == 0)
        return bench_attend(&o);
    if (strcmp(o.command, "pack") == 0)
        return bench_pack(&o);
    if (strcmp(o.command, "shared") == 0)
        return bench_shared(&o);
    if (strcmp(o.command, "step") == 0)
        return bench_step(&o);
    return bench_ring(&o);
}
