"""``python -m drivetrain.migrate FILE...``: rename Lightning's names in scripts and YAML files to drivetrain's.

The command changes only names and does not run the file. It lists on standard error, by line, the changes that remain
to be made, and exits with 1 if there are any.
"""

from __future__ import annotations

from drivetrain.migrate._command import main
from drivetrain.migrate._scripts import Migrated, migrate

__all__ = ["Migrated", "main", "migrate"]
