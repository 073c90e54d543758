// SPDX-License-Identifier: Apache-2.0
//
// --dry-run: each of these says what a command would take away, by questions that change nothing.
// They are rows' `preview` (commands.h) and take the command's own arguments.
#ifndef KVQ_TOOLS_KVQCTL_DRY_RUN_H
#define KVQ_TOOLS_KVQCTL_DRY_RUN_H

#include "tools/kvqctl/commands.h"

kvq__ctl_run kvq__ctl_preview_compact;
kvq__ctl_run kvq__ctl_preview_drain;
kvq__ctl_run kvq__ctl_preview_drop;
kvq__ctl_run kvq__ctl_preview_gc;
kvq__ctl_run kvq__ctl_preview_export;
kvq__ctl_run kvq__ctl_preview_import;
kvq__ctl_run kvq__ctl_preview_kick;
kvq__ctl_run kvq__ctl_preview_prefix_drop;
kvq__ctl_run kvq__ctl_preview_pull;
kvq__ctl_run kvq__ctl_preview_quota_delete;
kvq__ctl_run kvq__ctl_preview_quota_set;
kvq__ctl_run kvq__ctl_preview_reload;
kvq__ctl_run kvq__ctl_preview_remove;
kvq__ctl_run kvq__ctl_preview_shutdown;

#endif
