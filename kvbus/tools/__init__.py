"""What people run beside a bus: ``demo``, ``doctor``, ``top``, ``sim``, ``conform``, and captures of what was sent.

In: endpoints, a bus's HTTP port, captures. Out: what a person reads, or a peer that stands for an engine or a router.
:mod:`kvbus.cli` has the commands. A tool may use everything below it, the daemon included; nothing but the commands
imports a tool.
"""
