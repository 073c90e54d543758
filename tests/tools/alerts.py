#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each alert of packaging/prometheus fires when it should, and not before.

    tests/tools/alerts.py

Writes a test of Prometheus' own for each rule and has promtool run it; exit status 77 where there
is no promtool (Debian's package `prometheus`). Without this file's row an alert fails the test.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
RULES = os.path.join(ROOT, "packaging", "prometheus", "kvqd.rules.yml")
DOCTOR = os.path.join(ROOT, "daemon", "commands", "doctor.c")
HOST = 'instance="n1:9647", job="kvqd"'


def rising(name, step, labels=""):
    """A counter that stands still for ten minutes, and then grows so much a minute."""
    return {f"{name}{{{HOST}{labels}}}": f"0x10 0+{step}x50"}


def slow(name, bucket, labels=""):
    """A histogram whose observations of the last 50 minutes are all in one bucket."""
    bounds = ["0.001", "0.05", "0.2", "2.097152", "8", "+Inf"]
    at = bounds.index(bucket)
    return {f'{name}{{{HOST}{labels}, le="{bound}"}}':
            "0+60x10 " + (f"{600 + 0}x50" if i < at else "600+60x50")
            for i, bound in enumerate(bounds)}


# Series by the minute: quiet for ten minutes, then what the alert is about.
CASES = {
    "KvqdDown": {f"up{{{HOST}}}": "1x10 0x50"},
    "KvqdRestarted": {f"kvqd_uptime_seconds{{{HOST}}}": "1000+60x10 0+60x50"},
    "KvqdCrashLoop": {f"kvqd_uptime_seconds{{{HOST}}}": "1000+60x10" + 25 * " 0+60x1"},
    "KvqdDraining": {f"kvqd_draining{{{HOST}}}": "0x10 1x50"},
    "KvqdPoolFull": {f'kvqd_pool_used_bytes{{{HOST}, place="host"}}': "50x10 96x50",
                     f'kvqd_pool_bytes{{{HOST}, place="host"}}': "100x60"},
    "KvqdRefusesForRoom": rising("kvqd_refused_for_room_total", 5),
    "KvqdWaitsForRoom": {f"kvqd_waiting_for_room_now{{{HOST}}}": "0x10 3x50"},
    "KvqdNamespaceNearLimit": {
        f'kvqd_namespace_bytes{{{HOST}, namespace="a", tier="host"}}': "50x10 95x50",
        f'kvqd_namespace_limit_bytes{{{HOST}, namespace="a", tier="host"}}': "100x60"},
    "KvqdNamespaceRefused": rising("kvqd_namespace_refused_total", 5,
                                   ', namespace="a", limit="host"'),
    "KvqdThrashing": {**rising("kvqd_fetched_total", 60), **rising("kvqd_parked_room_total", 60)},
    "KvqdFetchFailed": rising("kvqd_fetch_failed_total", 1),
    "KvqdEvictionsFail": rising("kvqd_evictions_failed_total", 1),
    "KvqdSavesFail": rising("kvqd_store_failures_total", 1, ', task="save", reason="other"'),
    "KvqdStoreNearlyFull": {f"kvqd_storage_used_bytes{{{HOST}}}": "50x10 95x50",
                            f"kvqd_storage_limit_bytes{{{HOST}}}": "100x60",
                            f"kvqd_storage_free_bytes{{{HOST}}}": "900x60",
                            f"kvqd_storage_room_bytes{{{HOST}}}": "50x10 20x50"},
    "KvqdStoreReadOnly": {f"kvqd_storage_read_only{{{HOST}}}": "0x10 1x50"},
    "KvqdTransfersFail": rising("kvqd_store_failures_total", 1, ', task="push", reason="other"'),
    "KvqdAttentionSlow": slow("kvqd_request_seconds_bucket", "0.2", ', op="attend"'),
    "KvqdRequestsWait": slow("kvqd_request_wait_seconds_bucket", "2.097152"),
    "KvqdOwnFaults": rising("kvqd_refusals_total", 1, ', door="ring", status="E_SYSTEM"'),
    "KvqdPackErrorRises": {
        f'kvqd_pack_error_sum{{{HOST}, format="a", layer="0", of="k"}}': "0+1x10 16+6x50",
        f'kvqd_pack_error_count{{{HOST}, format="a", layer="0", of="k"}}': "0+10x60"},
    "KvqdErrors": rising("kvqd_refused_requests_total", 600),
}
FIRES = {"KvqdRestarted": "13m"}  # when to look; the others fire on until the end
# What two alerts make of each other's series: a daemon that is started again and again was started
# anew; one that was started once is in no loop.
BESIDE = [("KvqdRestarted", "KvqdCrashLoop", "59m", True),
          ("KvqdCrashLoop", "KvqdRestarted", "13m", False),
          # A store without a limit is nearly full when its disk is.
          ("KvqdStoreNearlyFull", "the disk is nearly full", "9m", False),
          ("KvqdStoreNearlyFull", "the disk is nearly full", "59m", True),
          # So is one whose disk others have filled, and not one that has room.
          ("KvqdStoreNearlyFull", "others have filled the disk", "9m", False),
          ("KvqdStoreNearlyFull", "others have filled the disk", "59m", True),
          ("KvqdStoreNearlyFull", "a limit far below the disk", "59m", False),
          # A save that failed once, and not again when it was tried anew.
          ("KvqdSavesFail", "a save failed once", "15m", False),
          ("KvqdSavesFail", "a save failed once", "25m", False)]
# What has no alert of its own.
CASES_BESIDE = {
    "the disk is nearly full": {f"kvqd_storage_used_bytes{{{HOST}}}": "50x10 95x50",
                                f"kvqd_storage_free_bytes{{{HOST}}}": "50x10 5x50"},
    "others have filled the disk": {f"kvqd_storage_used_bytes{{{HOST}}}": "50x60",
                                    f"kvqd_storage_free_bytes{{{HOST}}}": "500x10 50x50",
                                    f"kvqd_storage_room_bytes{{{HOST}}}": "400x10 0x50"},
    "a limit far below the disk": {f"kvqd_storage_used_bytes{{{HOST}}}": "10x60",
                                   f"kvqd_storage_limit_bytes{{{HOST}}}": "100x60",
                                   f"kvqd_storage_free_bytes{{{HOST}}}": "90000x60",
                                   f"kvqd_storage_room_bytes{{{HOST}}}": "80x60"},
    "a save failed once": {
        f'kvqd_store_failures_total{{{HOST}, task="save", reason="other"}}': "0x12 1x50"}}


def main():
    """Exit status: 0, 1 if an alert is not as it should be, 77 without promtool."""
    if not shutil.which("promtool"):
        print("alerts: skipped: there is no promtool (apt install prometheus)")
        return 77
    with open(RULES, encoding="utf-8") as file:
        text = file.read()
    names = re.findall(r"- alert: (\w+)", text)
    failed = [f"{name}: no test in tests/tools/alerts.py" for name in names if name not in CASES]
    failed += [f"{name}: is no alert" for name in CASES if name not in names]
    failed += unlike_doctor(text)
    with tempfile.TemporaryDirectory() as folder:
        for name in set(names) & set(CASES):
            for when, fires in (("9m", False), (FIRES.get(name, "59m"), True)):
                failed += check(folder, name, name, when, fires)
        for name, other, when, fires in BESIDE:
            failed += check(folder, name, other, when, fires)
    print(*failed, sep="\n", end="\n" if failed else "")
    print(f"alerts: {len(names) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def unlike_doctor(rules):
    """Whether kvqctl doctor calls a store full where the alert does not, or the other way round."""
    with open(DOCTOR, encoding="utf-8") as file:
        taken, room = re.search(r"STORE_TAKEN_PERCENT = (\d+), STORE_ROOM_PERCENT = (\d+)",
                                file.read()).groups()
    rule = rules.split("- alert: KvqdStoreNearlyFull")[1].split("- alert:")[0]
    wanted = [int(taken) / 100] * 2 + [1 - int(room) / 100] * 2
    found = [float(x) for x in re.findall(r"> (0\.\d+)", rule)]
    return [] if found == wanted else [f"KvqdStoreNearlyFull: from {found} on; "
                                       f"kvqctl doctor says so from {wanted} on"]


def check(folder, name, case, when, fires):
    """What is wrong with an alert at a minute of a case. For alerts promtool compares all labels
    and texts, so it is asked for the series that Prometheus makes of each."""
    look = {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
            "eval_time": when, "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}]}
    series = (CASES | CASES_BESIDE)[case]
    test = {"rule_files": [os.path.realpath(RULES)], "evaluation_interval": "1m", "tests": [
        {"interval": "1m", "promql_expr_test": [look],
         "input_series": [{"series": s, "values": v} for s, v in series.items()]}]}
    path = os.path.join(folder, f"{name}.yml")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(test, file)  # YAML, too
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True,
                          check=False)
    said = "fires" if fires else "is quiet"
    return [] if done.returncode == 0 else [f"{name}: not so that it {said} at {when}:\n"
                                            f"{done.stdout}{done.stderr}"]


if __name__ == "__main__":
    sys.exit(main())
