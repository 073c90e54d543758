// SPDX-License-Identifier: Apache-2.0
//
// What residency answers that takes several turns of the poller.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_ADVANCE_H
#define KVQ_DAEMON_CORE_RESIDENCY_ADVANCE_H

// How far something that takes several turns has come; below 0: a KVQ_E code. MORE: call it again
// in the next turn. LATER: call it again some milliseconds later, for memory for it is being made.
enum kvq__advance { KVQ__COMPLETE = 0, KVQ__MORE = 1, KVQ__LATER = 2 };

#endif
