"""Tools that people run beside a bus: ``demo``, ``doctor``, ``top``, ``sim``, ``conform``, and captures of streams.

Input: endpoints, the HTTP port of a bus, captures. Output: text for a person, or a program that acts as an engine or a
router. A tool may import any lower package, including the daemon. Only :mod:`kvbus.cli`, which has the commands, may
import a tool.
"""
