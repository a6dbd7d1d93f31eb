"""Parse and build ZeroMQ messages and their MessagePack payloads, in the form that each family of routers reads.

The package takes received frames and payloads. It returns parsed messages, events in the form that the core uses, and
encoded bytes. It knows every dialect of the engines and every profile of the routers, and keeps no state. The only
other module of the core that it may import is ``types``.
"""
