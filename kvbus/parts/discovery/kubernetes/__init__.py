"""Engines from the Kubernetes API: pods by their labels.

In: a selector. Out: the engines among them, watched. The account needs a Role that may list and watch.
"""
