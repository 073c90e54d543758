# SPDX-License-Identifier: Apache-2.0
"""First tokens that stay raw, wherever a session's first page goes."""
import numpy as np
from e2e_rig import Test, Tokens, kvq


class Sinks(Test):
    def opened(self, tokens, format, **options):
        session = self.client.session(tokens.rows, format, **options)
        tokens.feed(self.queue, session, tokens.n, attend=False)
        return session

    def test_fork_within_the_first_page(self):
        """Of a session whose first page is packed and no longer raw."""
        tokens = Tokens(7, 600)
        for format in ("kivi-sink2", "kivi2:sink=96:unit=32", "innerq-base"):
            session = self.opened(tokens, format, prompt_tokens=256)
            for at in (128, 96, 64, 32):
                try:
                    fork, = self.queue.fork([session], at)
                except kvq.Error as e:  # what the format has learned from cannot be cut
                    self.assertEqual((format, e.code), ("innerq-base", kvq.Code.E_ROLLBACK))
                    continue
                for own, same in zip(self.queue.read(session, 0, 0, at), self.queue.read(fork, 0)):
                    np.testing.assert_array_equal(own, same)
                fork.close()
            session.close()
