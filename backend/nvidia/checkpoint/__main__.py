"""``python -m backend.nvidia.checkpoint``: see :mod:`backend.nvidia.checkpoint.agent`."""

import sys

from backend.nvidia.checkpoint.agent import main

sys.exit(main())
