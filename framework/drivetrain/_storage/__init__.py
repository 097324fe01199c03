"""Files on a local disk or at a URL: the only room that opens URLs, renames and syncs files, and locks folders."""
