"""One engine, by its own HTTP API.

In: its base URL. Out: its publishers, as it says itself where they are.
"""
