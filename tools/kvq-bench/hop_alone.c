// SPDX-License-Identifier: Apache-2.0
//
// `kvq-bench hop` as a program of its own, without what the other commands link: it travels to
// machines with a GPU (tools/gpu-check.sh --pack).
#include "tools/kvq-bench/bench.h"

int main(int argc, char **argv)
{
    return hop_main(argc, argv);
}
