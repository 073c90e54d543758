# SPDX-License-Identifier: Apache-2.0
"""python -m kvq.eval; see the package."""
import sys

from . import main

sys.exit(main())
