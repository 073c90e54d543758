/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/error.h: status codes and error texts. For everybody; all other headers include this one.
 *
 * A call returns 0 or a negative KVQ_E code; kvq_error_text() has the details in words. Of a call
 * over a batch, the code is that of the request as a whole (then no session was touched), and each
 * entry has a status of its own: one session's failure never fails another.
 *
 * Structures that may get more fields in a later version begin with `size`. Set size to sizeof the
 * structure, and all fields that you do not use to 0. Then programs and libraries of different
 * versions understand each other: the library reads fields that an older program lacks as 0; an
 * older library refuses fields that it does not know with KVQ_E_UNSUPPORTED unless they are 0, and
 * sets them to 0 where it fills the structure. The library refuses a size that was not set with
 * KVQ_E_INVALID. Structures without `size` (entries, work, tensors, layers, ..) do not grow.
 */
#ifndef KVQ_PUBLIC_ERROR_H
#define KVQ_PUBLIC_ERROR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVQ_API   __attribute__((visibility("default")))
#define KVQ_CHECK __attribute__((warn_unused_result))
#else
#define KVQ_API
#define KVQ_CHECK
#endif

#define KVQ_VERSION_MAJOR 0
#define KVQ_VERSION_MINOR 2
#define KVQ_VERSION_PATCH 0

enum {
    KVQ_OK = 0,
    KVQ_E_INVALID = -1,
    KVQ_E_VERSION = -2,
    KVQ_E_NO_DAEMON = -3,
    KVQ_E_PERMISSION = -4,
    KVQ_E_NO_SESSION = -5,
    KVQ_E_STALE = -6,
    KVQ_E_BUSY = -7,
    KVQ_E_EXISTS = -8,
    KVQ_E_SHAPE = -9,
    KVQ_E_DTYPE = -10,
    KVQ_E_FORMAT = -11,
    KVQ_E_POSITION = -12,
    KVQ_E_BOUNDS = -13,
    KVQ_E_LIMIT = -14,
    KVQ_E_NO_MEMORY = -15,
    KVQ_E_QUOTA = -16,
    KVQ_E_NONFINITE = -17,
    KVQ_E_NO_STEP = -18,
    KVQ_E_INCOMPLETE = -19,
    KVQ_E_ROLLBACK = -20,
    KVQ_E_READ_ONLY = -21,
    KVQ_E_DEADLINE = -22,
    KVQ_E_CANCELLED = -23,
    KVQ_E_DISCONNECTED = -24,
    KVQ_E_EPOCH = -25,
    KVQ_E_PROTOCOL = -26,
    KVQ_E_CREDITS = -27,
    KVQ_E_DRAINING = -28,
    KVQ_E_BUFFER = -29,
    KVQ_E_SYSTEM = -30,
    KVQ_E_UNSUPPORTED = -31,
    KVQ_E_TAKEN = -32,
    KVQ_E_INTERNAL = -33,
    KVQ_E_NO_CLIENT = -34,
    KVQ_E_NO_SPACE = -35,
    KVQ_E_DAMAGED = -36,
    KVQ_E_REMOTE = -37,
    KVQ_E_NO_NAMESPACE = -38
};

/* One sentence for a code; never NULL. Thread-safe. */
KVQ_API const char *kvq_strerror(int code);

/* The cause of the calling thread's last failed call: the value, the limit, what to do. After a
 * call over a batch that returned 0: the cause of the first entry's failure. Never NULL; valid
 * until the thread's next kvq call. */
KVQ_API const char *kvq_error_text(void);

/* The version of the library, not of the daemon: "0.2.0". */
KVQ_API const char *kvq_version(void);

#ifdef __cplusplus
}
#endif

#endif
