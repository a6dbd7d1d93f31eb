"""Discoverers: each finds engines in its own way. Each kind of ``sources[].discover`` has one module.

A discoverer receives the settings of one ``sources`` entry, and a signal when an engine that it found is disconnected.
Each time something changes, it yields the complete set of engines. An entry point ``kvbus.discovery`` registers a kind,
and :mod:`kvbus.config.parts` finds it. ``contract`` defines what a discoverer has to do. No code outside depends on its
kind.
"""
