"""Optional: credentials that a third party knows. Each module is one such party, and nothing else imports it.

In: a token, and what is asked for with it. Out: a name and until when that holds, or why not. Whatever goes wrong on
the way is a refusal.
"""
