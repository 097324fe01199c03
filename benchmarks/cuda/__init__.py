"""`make cuda`: everything that needs a GPU, in parts that are run one by one, and one report of them all.

What runs with the machine's own Python and torch is in the files named after the parts. `__main__` and what it imports
need Python alone, so that they can say what is missing.
"""
