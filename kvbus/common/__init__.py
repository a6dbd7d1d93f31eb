"""What the packages around the core share, and belongs to none of them: small, and without a dependency.

Errors with their exit codes, log lines, tasks that end, threads that get their turn, counters that several write, which
core runs, and that one version of kvbus is installed. Nothing of kvbus comes in, and everything but the core may take
what goes out. It may use the standard library alone.
"""
