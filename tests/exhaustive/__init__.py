"""Explores every order of events up to a depth, with the real relay, an engine and two routers (``make explore``)."""
