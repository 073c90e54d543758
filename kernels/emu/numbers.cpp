// SPDX-License-Identifier: Apache-2.0
//
// Rounding to 16 bits as the GPU does it.
#include "kernels/emu/emu.h"

namespace gpu
{
uint16_t float_to_half(float x)
{
    const uint32_t bits = as_bits(x), rest = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (rest > 0x7f800000u)
        return sign | 0x7e00;
    if (rest >= 0x477ff000u) // 65520 and more round to infinity
        return sign | 0x7c00;
    if (rest < 0x38800000u) // below 2^-14; adding 1/2 rounds at the place of a subnormal
        return sign | (uint16_t)(as_bits(as_float(rest) + 0.5f) - 0x3f000000u);
    return sign | (uint16_t)((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

static uint32_t to_bf16(float x)
{
    const uint32_t bits = as_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000u)
        return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t pack2_bf16(float lo, float hi)
{
    return to_bf16(lo) | to_bf16(hi) << 16;
}
} // namespace gpu
