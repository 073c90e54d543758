// SPDX-License-Identifier: Apache-2.0
//
// The symbols of the driver's library: each one, by its name there, is the call of the same row
// after what every call asks first (enter, in fault.cpp).
#include "kernels/emu/soft/machine.h"

namespace
{
template <soft::call row, auto function> struct entry;

template <soft::call row, typename... Args, int (*function)(Args...)> struct entry<row, function> {
    static int call(Args... args)
    {
        const int result = soft::enter(row);
        return result ? result : function(args...);
    }
};
} // namespace

// The loader asks the resolver once, before anything else of a program runs, and binds the symbol
// to what it answers.
#define NO_SANITIZER __attribute__((no_sanitize_thread))
#define RESOLVE(field, symbol, args)                                                               \
    extern "C" NO_SANITIZER decltype(kvq_gpu_driver::field) kvq_soft_resolve_##field(void)         \
    {                                                                                              \
        return entry<soft::CALL_##field, soft::field>::call;                                       \
    }                                                                                              \
    extern "C" int symbol args __attribute__((ifunc("kvq_soft_resolve_" #field)));
KVQ_GPU_CALLS(RESOLVE)

// See KVQ_GPU_KERNELS_INSIDE.
extern "C" const int kvq_gpu_kernels_inside;
const int kvq_gpu_kernels_inside = 1;
