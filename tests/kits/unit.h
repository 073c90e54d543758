// SPDX-License-Identifier: Apache-2.0
//
// cmocka, for tests and their kits: the headers that it wants before it, and it.
#ifndef KVQ_TESTS_UNIT_H
#define KVQ_TESTS_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

// Every test gets a state that few look at, and a stand-in for a function gets what that is given.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#endif
