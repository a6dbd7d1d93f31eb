"""The judge of a router.

It acts as an engine with faults, and asks the router after each case which blocks it holds.
"""
