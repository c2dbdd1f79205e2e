"""The command `crt`: everything that prints or describes the command line is here, one file for each verb.

It may import every other room, and nothing imports it.
"""
