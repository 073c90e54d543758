# SPDX-License-Identifier: Apache-2.0
"""The log at level debug: what engines and users ask for, and why requests are refused."""
import re

from e2e_rig import Test, Tokens, kvq

KINDS = "event=(request_refused|asked|control_asked) "


class Details(Test):
    """The daemon's lines of level debug."""

    def work(self):
        """Two refusals, one by message and one by a queue, and a question; by a client of its own,
        for a client's refused requests are told once a second."""
        with self.daemon.client() as client, client.queue() as queue:
            session = client.session(Tokens(1, 1).rows, "f16")
            Tokens(1, 300).feed(queue, session, 300, attend=False)
            with self.assertRaises(kvq.Error):
                client.session(Tokens(1, 1).rows, "f17")
            with self.assertRaises(kvq.Error):
                queue.truncate([session], [5])  # it was opened without max_rollback
        self.daemon.ctl("session", "list")

    def test_details(self):
        self.work()
        self.daemon.ctl("config", "set", "log_level", "debug")
        self.daemon.wait_log("event=changed ")
        self.assertEqual([x for x in self.daemon.lines if re.search(KINDS, x)], [])
        self.work()
        for line in ("asked client=[1-9].* command=open_session status=OK",
                     'asked client=[1-9].* command=open_session status=E_FORMAT text=".*f17',
                     'request_refused client=[1-9].* text="TRUNCATE of step 0, layer 0: .*'
                     r'\(E_ROLLBACK\); 0 more since"',
                     "control_asked uid=.* role=.* command=list_sessions status=OK"):
            self.daemon.wait_log("level=debug event=" + line)
