// SPDX-License-Identifier: Apache-2.0
//
// Picks the table of functions for the CPU that we run on. The only place that fills tables.
#include <pthread.h>
#include <stdlib.h>
#ifdef KVQ_HAVE_AVX2
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/internal.h"

static struct kvq_kernels tables[KVQ_ISA_BEST + 1];
static int best_isa;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// What KVQ_CPU_MASK allows: the instruction set it names; if it is unset or unknown everything but
// AMX, with which a prompt's outputs are not the same to the bit whatever its pieces.
static int masked_isa(void)
{
    const char *mask = getenv("KVQ_CPU_MASK");
    if (mask && strcmp(mask, "c") == 0)
        return KVQ_ISA_C;
    if (mask && strcmp(mask, "avx2") == 0)
        return KVQ_ISA_AVX2;
#ifndef KVQ_AVX512_IN_SOFTWARE // there tests have it without asking
    if (!mask || strcmp(mask, "amx") != 0)
        return KVQ_ISA_AVX512;
#endif
    return KVQ_ISA_BEST;
}

// __builtin_cpu_supports also asks whether the operating system saves the registers.
#ifdef KVQ_HAVE_AVX2
// clang 14 does not know "f16c" there; its registers are those of AVX.
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
#endif

#ifdef KVQ_HAVE_AVXVNNI
// vpdpbusd in the encoding of AVX, which CPUs without AVX-512 may have.
static bool has_avxvnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 4;
}
#endif

#if defined(KVQ_AVX512_IN_SOFTWARE) // for tests alone: tests/kernels/simde/immintrin.h
static bool has_avx512(void)
{
    return true;
}
#elif defined(KVQ_HAVE_AVX512)
static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(KVQ_AVX512_IN_SOFTWARE)
static bool has_amx(void)
{
    return true;
}
#elif defined(KVQ_HAVE_AMX)
// Linux gives a process the tile registers when it asks, which only those do that are to use them.
// A process that has set aside too little memory for signals (sigaltstack) is refused; so it may be
// by a sandbox.
static bool has_amx(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 };   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const unsigned wanted = 1u << 22 | 1u << 24; // AMX-BF16, AMX-TILE
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & wanted) == wanted && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

static void add_table(int isa, const char *name, void (*init)(struct kvq_kernels *))
{
    if (isa > KVQ_ISA_C)
        tables[isa] = tables[best_isa];
    init(&tables[isa]);
    tables[isa].isa = isa;
    tables[isa].name = name;
    best_isa = isa;
}

static void fill_tables(void)
{
    add_table(KVQ_ISA_C, "c", kvq__init_c);
#ifdef KVQ_HAVE_AVX2
    if (!has_avx2())
        return;
    add_table(KVQ_ISA_AVX2, "avx2", kvq__init_avx2);
#endif
#ifdef KVQ_HAVE_AVXVNNI
    if (has_avxvnni())
        kvq__init_avxvnni_bytes(&tables[KVQ_ISA_AVX2]);
#endif
#ifdef KVQ_HAVE_AVX512
    if (!has_avx512())
        return;
    add_table(KVQ_ISA_AVX512, "avx512", kvq__init_avx512);
#endif
#ifdef KVQ_HAVE_AMX
    if (masked_isa() == KVQ_ISA_AMX && has_amx())
        add_table(KVQ_ISA_AMX, "amx", kvq__init_amx);
#endif
}

const struct kvq_kernels *kvq_kernels_get(int max_isa)
{
    pthread_once(&once, fill_tables);
    int isa = masked_isa();
    if (isa > max_isa)
        isa = max_isa;
    if (isa > best_isa)
        isa = best_isa;
    while (isa > KVQ_ISA_C && !tables[isa].name)
        isa--;
    return &tables[isa < KVQ_ISA_C ? KVQ_ISA_C : isa];
}

const char *kvq_kernels_isa(const struct kvq_kernels *k)
{
    return k->name;
}

bool kvq_kernels_has_fast(const struct kvq_kernels *k, const struct kvq_format *f,
                          const struct kvq_shape *s)
{
    struct kvq__codec codec = kvq__codec_of(f, s, NULL, 0);
    uint32_t gqa = s->q_heads / s->kv_heads;
    return k->has_fast && !kvq_is_raw(f) && k->has_fast(&codec, gqa);
}
