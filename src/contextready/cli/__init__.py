"""The command `crt`: everything that prints or describes the command line, one file per verb.

It may import every other package, and nothing imports it.
"""
