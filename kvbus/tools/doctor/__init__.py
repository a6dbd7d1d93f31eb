"""``kvbus doctor``: connect to every endpoint of a configuration once, and report each problem with its cause.

The probes disturb neither the engines nor a running bus. A probe is an ordinary subscription or one small replay
request. doctor binds no port that a running bus may need.
"""
