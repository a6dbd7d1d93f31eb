"""Outputs in the engines' own protocol: PUB for the live stream, ROUTERs for replay and snapshots.

In: numbered batches and answers. Out: requests of routers. It uses ``transport`` for every socket.
"""
