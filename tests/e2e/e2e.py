#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests: real daemons on directories of their own, real client processes, kill -9.

    tests/e2e/e2e.py [NAME]...     run the tests whose name holds one of these; default all

KVQ_BIN_DIR says where kvqd and kvqctl are (default build/test/bin). KVQ_FULL=1 makes the soak
last a minute. Several processes with the same empty folder in KVQ_E2E_CLAIMS share the tests. The
last line is "N passed, M failed, K skipped".
"""
import sys

import e2e_axe
import e2e_breaks
import e2e_campaign
import e2e_completion
import e2e_ctl
import e2e_details
import e2e_dims
import e2e_dry_run
import e2e_errors
import e2e_evict
import e2e_exits
import e2e_faults
import e2e_floods
import e2e_formats
import e2e_gpu
import e2e_group
import e2e_http
import e2e_life
import e2e_lists
import e2e_main
import e2e_names
import e2e_page
import e2e_park
import e2e_prefix
import e2e_prompt
import e2e_quota
import e2e_remote
import e2e_remote_disk
import e2e_reshard
import e2e_rig
import e2e_roles
import e2e_service
import e2e_short
import e2e_sinks
import e2e_size
import e2e_soak
import e2e_storage
import e2e_tables
import e2e_top
import e2e_work

SUITES = [e2e_main.TwoEngines, e2e_main.SameBits, e2e_main.Shapes, e2e_work.Change,
          e2e_work.Requests, e2e_work.Holding, e2e_errors.BadOpen, e2e_errors.BadWork,
          e2e_errors.BadPeople, e2e_faults.DeadClients, e2e_faults.DeadDaemon,
          e2e_faults.Memory, e2e_formats.OwnFormats, e2e_life.Life,
          e2e_service.Reloads, e2e_service.Ends, e2e_service.Audited, e2e_service.Told,
          e2e_service.Machine, e2e_roles.Users, e2e_roles.Keys,
          e2e_roles.Choices, e2e_gpu.Faults, e2e_gpu.OnTheHost,
          e2e_breaks.Breaks, e2e_campaign.Campaign,
          e2e_group.Ranks, e2e_group.Moves, e2e_prefix.Prefixes,
          e2e_prefix.Stored, e2e_prompt.Pieces, e2e_prompt.Kept, e2e_prompt.Short,
          e2e_page.Page, e2e_park.Parks, e2e_evict.Evicts, e2e_evict.NoStorage, e2e_names.Names,
          e2e_lists.Lists, e2e_ctl.Ping, e2e_ctl.Doctor, e2e_ctl.Found, e2e_ctl.Events,
          e2e_ctl.Output, e2e_ctl.Watch, e2e_ctl.Absent, e2e_details.Details,
          e2e_tables.Tables,
          e2e_short.Short, e2e_short.ShortRemote,
          e2e_completion.Completion, e2e_top.TopOnTerminal,
          e2e_exits.Exits, e2e_dry_run.DryRun, e2e_dry_run.DryRunRemote,
          e2e_storage.Saves,
          e2e_storage.Tidy, e2e_storage.Killed, e2e_storage.Ends, e2e_storage.Trouble,
          e2e_quota.Quotas, e2e_remote.Transfers, e2e_remote.Trouble, e2e_remote.Keys,
          e2e_remote_disk.FullDisk, e2e_remote_disk.PullFullDisk, e2e_reshard.Shards,
          e2e_floods.Floods, e2e_http.Monitors, e2e_http.Stores, e2e_http.StorePage,
          e2e_http.PackError, e2e_http.Addresses, e2e_axe.Axe, e2e_size.Size, e2e_sinks.Sinks,
          e2e_sinks.Stored, e2e_dims.Dims, e2e_soak.Soak]


def left_out():
    """Classes with tests that no suite is or is made of: they would never run."""
    parts = {part for suite in SUITES for part in suite.__mro__}
    for name, module in list(sys.modules.items()):
        for part in vars(module).values() if name.startswith("e2e_") else ():
            if isinstance(part, type) and part.__module__ == name and part not in parts and any(
                    test.startswith("test_") for test in vars(part)):
                yield f"{name}.{part.__name__}"


if __name__ == "__main__":
    if any(left_out()):
        sys.exit(f"e2e.py: no suite has {', '.join(left_out())}")
    sys.exit(e2e_rig.run(SUITES, __doc__))
