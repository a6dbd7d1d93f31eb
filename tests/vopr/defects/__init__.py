"""Defects that were once found by hand. The simulation must find each one when it is put back.

Each module has ``put_back``, a context manager that restores the old behaviour of one or two functions.
"""
