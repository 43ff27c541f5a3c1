"""A generator of hostile tenants: every pair of things that a program can do, at the same time, on a real mount.

registry.py  a tenant, and the kinds of things that it does, by name
files.py descriptors.py processes.py namespaces.py messages.py soft.py cuda.py     the kinds
tenant.py    programs that do two of them at the same time; it forks one for each pair of a round
neighbour.py an honest program of another user, which is timed        operator.py  root, which sets and takes away
page.py      shared by all of these: one page of memory               driver.py    a driver in memory, behind a mount
daemon.py    the daemon, looked at from outside                       books.py     the sums
rounds.py    which pairs, when; what must hold after each round
"""
