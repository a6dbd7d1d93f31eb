"""A search of every order of events up to a depth, with the real relay, one engine and two routers (``make
explore``).
"""
