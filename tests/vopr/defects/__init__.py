"""Old defects of kvbus, for a check of the simulation: it must find each defect when the defect is added again.

Each module has a context manager ``put_back``, which restores the old behaviour of one or two functions.
"""
