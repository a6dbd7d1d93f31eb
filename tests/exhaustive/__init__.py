"""Search every order of events up to a depth for a failure of kvbus (``make explore``).

The search uses the real relay, one engine and two routers.
"""
