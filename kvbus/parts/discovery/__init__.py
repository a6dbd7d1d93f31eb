"""Discoverers, which find the engines whose events kvbus reads.

Each kind of ``sources[].discover`` has one module in this package.

A discoverer receives the settings of one ``sources`` entry. Each time an engine appears, changes or disappears, the
discoverer yields the complete set of engines. When the connection to one of these engines is lost, the daemon notifies
the discoverer.

The entry point group ``kvbus.discovery`` registers the kinds, and :mod:`kvbus.config.parts` loads the kind that an
entry names. ``contract`` defines what a discoverer has to do. Code outside this package is the same for all kinds.
"""
