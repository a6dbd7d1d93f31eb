"""Engines from the DNS: the addresses of a name, or the hosts and ports of its SRV records.

In: a name. Out: the engines behind it, as its records come and go. It needs the extra ``dns``.
"""
