"""``kvbus index``: a process that follows buses, engines or a log, and answers which worker holds which prefix.

In: streams, through :mod:`kvbus.client`, as routers read them. Out: answers over HTTP.
"""
