"""Engines from a file that somebody else writes: a list, replaced or changed in place.

In: a path. Out: the engines that stand in the file.
"""
