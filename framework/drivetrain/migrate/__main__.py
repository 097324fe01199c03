"""``python -m drivetrain.migrate``."""

from __future__ import annotations

import sys

from drivetrain.migrate._command import main

if __name__ == "__main__":
    sys.exit(main())
