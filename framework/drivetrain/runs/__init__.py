"""What a run leaves behind: its folder, and in it ``run.json``, the record of what it was and how it ended."""
