# SPDX-License-Identifier: Apache-2.0
"""Lists that no reply of the daemon can hold: kvqctl shows all of them."""
from e2e_rig import Tokens
from e2e_storage import Stored

SESSIONS = 3000
SAVED = 400


class Lists(Stored):
    def test_sessions(self):
        """Each session once, for people and for scripts, and each that is closed to the last."""
        rows = Tokens(1, 1).rows
        names = {f"{i:0{1 + i % 120}}-{i}" for i in range(SESSIONS)}
        for name in names:
            self.client.session(rows, "f16", name=name).close()
        listed = [s["name"] for s in self.daemon.ctl("session", "list")]
        self.assertEqual(len(listed), SESSIONS)
        self.assertEqual(set(listed), names)
        self.assertEqual(self.daemon.status()["sessions"], SESSIONS)
        for name in sorted(names)[:SESSIONS // 2]:
            self.client.session(name=name, must_exist=True).drop()
        listed = {s["name"] for s in self.daemon.ctl("session", "list")}
        self.assertEqual(listed, set(sorted(names)[SESSIONS // 2:]))

    def test_saved(self):
        """So with saved ones, of all namespaces and of one; parked ones without a name are none."""
        tokens = Tokens(1, 1)
        names = {f"{i:0120}" for i in range(SAVED)}
        for name in names:
            with self.client.session(tokens.rows, "f16", name=name) as session:
                session.save()
        stored = [s["name"] for s in self.daemon.ctl("storage", "list")]
        self.assertEqual(len(stored), SAVED)
        self.assertEqual(set(stored), names)
        space = self.daemon.ctl("session", "list")[0]["namespace"]
        stored = [s["name"] for s in self.daemon.ctl("storage", "list", "--namespace", space)]
        self.assertEqual(len(stored), SAVED)
