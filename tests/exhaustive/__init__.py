"""Every order of events up to a depth: the real relay, one engine, two routers (``make explore DEPTH=…``)."""
