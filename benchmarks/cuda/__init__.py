"""`make cuda`: everything that needs a GPU, in parts that can be run separately, and one report of all of them.

Code that uses the machine's own Python and torch is in the files named after the parts. `__main__` and its imports need
only Python, so that they can report what is missing.
"""
