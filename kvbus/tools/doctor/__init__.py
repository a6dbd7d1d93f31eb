"""What is wrong: every endpoint of a configuration is dialled once, and what is found is said with its cause.

It disturbs nobody: a probe is an ordinary subscriber, or one small replay request, and it binds nothing that a running
bus may want.
"""
