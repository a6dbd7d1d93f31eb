"""Defects that were found by hand, put back one at a time: the simulation has to find each of them.

A module has ``put_back``, a context in which one or two functions are as they were.
"""
