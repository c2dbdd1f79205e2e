"""The paper's tables in miniature, and the ledger of its claims.

May import study, bench and pointer, and the packages below them.
"""
