"""``kvbus doctor``: dial every endpoint of a configuration once, and report each problem with its cause.

The probes do not disturb the engines or a running bus. A probe is an ordinary subscriber or one small replay request.
It does not bind a port that a running bus may need.
"""
