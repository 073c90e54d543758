// SPDX-License-Identifier: Apache-2.0
//
// Picks the table of functions for the CPU that we run on. The only place that fills tables.
#include <pthread.h>

#include "kernels/internal.h"

static struct kvq_kernels tables[KVQ_ISA_BEST + 1];
static pthread_once_t once = PTHREAD_ONCE_INIT;

// `init` improves on the next lower table.
static void add_table(int isa, void (*init)(struct kvq_kernels *))
{
    if (isa > KVQ_ISA_C)
        tables[isa] = tables[isa - 1];
    init(&tables[isa]);
    tables[isa].isa = isa;
}

static void fill_tables(void)
{
    const int cpu = kvq__cpu_isa();
    add_table(KVQ_ISA_C, kvq__init_c);
#ifdef KVQ_HAVE_AVX2
    if (cpu >= KVQ_ISA_AVX2)
        add_table(KVQ_ISA_AVX2, kvq__init_avx2);
#endif
#ifdef KVQ_HAVE_AVXVNNI
    if (cpu >= KVQ_ISA_AVX2 && kvq__cpu_has_avxvnni())
        kvq__init_avxvnni_bytes(&tables[KVQ_ISA_AVX2]);
#endif
#ifdef KVQ_HAVE_AVX512
    if (cpu >= KVQ_ISA_AVX512)
        add_table(KVQ_ISA_AVX512, kvq__init_avx512);
#endif
#ifdef KVQ_HAVE_AMX
    if (cpu >= KVQ_ISA_AMX)
        add_table(KVQ_ISA_AMX, kvq__init_amx);
#endif
    (void)cpu;
}

const struct kvq_kernels *kvq_kernels_get(int max_isa)
{
    pthread_once(&once, fill_tables);
    return &tables[kvq_isa_best(max_isa)];
}

const char *kvq_kernels_isa(const struct kvq_kernels *k)
{
    return kvq_isa_name(k->isa);
}

bool kvq_kernels_has_fast(const struct kvq_kernels *k, const struct kvq_format *f,
                          const struct kvq_shape *s)
{
    struct kvq__codec codec = kvq__codec_of(f, s, NULL, 0);
    uint32_t gqa = s->q_heads / s->kv_heads;
    return k->has_fast && !kvq_is_raw(f) && k->has_fast(&codec, gqa);
}
