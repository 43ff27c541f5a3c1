"""`python -m ggroupfs.dra`: the command ``ggroupfs-dra``."""

import sys

from ggroupfs.dra.cli import main

sys.exit(main())
