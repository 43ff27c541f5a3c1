"""``python -m ggroupfs``."""

import sys

from ggroupfs.cli import main

sys.exit(main())
