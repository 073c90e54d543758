// SPDX-License-Identifier: Apache-2.0
//
// Which instruction sets this build, this CPU and KVQ_CPU_MASK allow. Apart from the tables of
// functions, so that a program that only names the instruction set links none of them.
#include <pthread.h>
#include <stdlib.h>
#ifdef KVQ_HAVE_AVX2
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/internal.h"

static int cpu_isa;
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
bool kvq__cpu_has_avxvnni(void)
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

static void ask_cpu(void)
{
    cpu_isa = KVQ_ISA_C;
#ifdef KVQ_HAVE_AVX2
    if (!has_avx2())
        return;
    cpu_isa = KVQ_ISA_AVX2;
#endif
#ifdef KVQ_HAVE_AVX512
    if (!has_avx512())
        return;
    cpu_isa = KVQ_ISA_AVX512;
#endif
#ifdef KVQ_HAVE_AMX
    if (masked_isa() == KVQ_ISA_AMX && has_amx())
        cpu_isa = KVQ_ISA_AMX;
#endif
}

int kvq__cpu_isa(void)
{
    pthread_once(&once, ask_cpu);
    return cpu_isa;
}

int kvq_isa_best(int max_isa)
{
    const int cpu = kvq__cpu_isa();
    int isa = masked_isa();
    if (isa > max_isa)
        isa = max_isa;
    if (isa > cpu)
        isa = cpu;
    return isa < KVQ_ISA_C ? KVQ_ISA_C : isa;
}

const char *kvq_isa_name(int isa)
{
    static const char *const names[KVQ_ISA_BEST + 1] = {"c", "avx2", "avx512", "amx"};
    return names[isa];
}
